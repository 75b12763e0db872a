"""Every derived table: its sources, and the view that it is of them or the function that builds it."""

from importlib import import_module
from pathlib import Path
from typing import Any

from lowband.errors import UserError
from lowband.evidence.tables.view import View
from lowband.spec.yaml_model import Strict, read_entries

REPORTED = "reported/"  # a source with this prefix is a file of results/reported/: numbers from papers
SHIPPED = "shipped/"  # and with this one, all such files of results/reference/; of any folder without one

OF_GPUS = f"{SHIPPED}kernels"  # rows of `lowband bench-kernel`, of every device shipped
COLLECTED = ("runs", "steps", "bytes", "states", "outside")  # written by `lowband collect`


def code_at(module: str, name: str, where: str) -> Any:
    """What an entry names: an object of a module below lowband.evidence. Raises UserError if it is not there.

    where: the entry
    """
    path = f"lowband.evidence.{module}"
    try:
        found = import_module(path)
    except ModuleNotFoundError as error:
        if not f"{path}.".startswith(f"{error.name}."):  # a file that is there imports what is not
            raise
        file = f"lowband/evidence/{module.replace('.', '/')}.py"
        raise UserError(f"no file {file}", where=where, allowed="a view, or code in such a file") from None
    if not hasattr(found, name):
        raise UserError(f"no '{name}' in {module}", where=where, allowed="what its file defines")
    return getattr(found, name)


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
