"""Raw tables -> derived tables, by name. A table is a file of `tables/` and a line here."""

from importlib import import_module
from pathlib import Path

from lowband.errors import UserError
from lowband.report.files import read_table, write_csv

REPORTED = "reported/"  # a source of this name is a file of results/reported/: what papers print

# table -> the tables it is made of, in the order that its `build` takes them
TABLES: dict[str, tuple[str, ...]] = {
    "scaling": ("runs", "steps"),
    "communication": ("bytes",),
    "memory": ("states",),
    "loss": ("steps",),
    "parity": ("runs", "loss"),
    "convergence": ("steps",),
    "convergence_curves": ("steps",),
    "peers": ("runs", "steps", "outside"),
    "peer_bytes": ("runs",),
    "box": ("runs",),
    "box_ratios": ("runs", "reported/01_frontier_low_bandwidth_2501.04266"),
    "accuracy": ("validation",),
}

# Tables of a suite that is no part of a reproduction: from its shipped raw tables in results/reference/
SUITE_OF = {
    "convergence": "convergence",
    "convergence_curves": "convergence",
    "peers": "peers",
    "peer_bytes": "peers",
    "box": "box",
    "box_ratios": "box",
}


def source_path(source: str, tables_dir: Path, root: Path) -> Path:
    """The file of a table's source. root: the folder that holds results/"""
    return (root / "results" if source.startswith(REPORTED) else tables_dir) / f"{source}.csv"


def write_table(name: str, tables_dir: Path, out_dir: Path | None = None, root: Path = Path()) -> None:
    """Write `name`.csv from tables of `tables_dir` to `out_dir` (default: there too).

    Raises UserError for a name that is not in TABLES.
    """
    if name not in TABLES:
        raise UserError(f"no table '{name}'", allowed=TABLES)
    build = import_module(f"lowband.report.tables.{name}").build
    write_csv(
        build(*[read_table(source_path(source, tables_dir, root)) for source in TABLES[name]]),
        (out_dir or tables_dir) / f"{name}.csv",
    )
