"""Every derived table: its sources, and the view that it is of them or the function that builds it."""

from pathlib import Path

from lowband.evidence.tables.view import View
from lowband.spec.yaml_model import Strict, read_entries

REPORTED = "reported/"  # a source with this prefix is a file of results/reported/: numbers from papers
SHIPPED = "shipped/"  # and with this one, all such files of results/reference/; of any folder without one

OF_GPUS = f"{SHIPPED}kernels"  # rows of `lowband bench-kernel`, of every device shipped
COLLECTED = ("runs", "steps", "bytes", "states", "outside")  # written by `lowband collect`


class Table(Strict):
    """A derived table. Its keys: tables.yaml."""

    name: str
    sources: tuple[str, ...]
    suite: str | None = None
    view: View | None = None
    build: str | None = None

    @property
    def place(self) -> tuple[str, str]:
        """Without a view: the module below lowband.evidence that builds the table, and its function."""
        module, _, function = (self.build or f"tables.derived.{self.name}:build").partition(":")
        return module, function


TABLES: dict[str, Table] = read_entries(Table, Path(__file__).with_name("tables.yaml"), "name")
