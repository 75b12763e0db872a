"""Raw tables -> derived tables, by name. A table is a file of `derived/` and a line here."""

from collections.abc import Collection, Iterable
from importlib import import_module
from pathlib import Path

import pandas as pd

from lowband.errors import UserError
from lowband.spec.benchmarks import BENCHMARKS
from lowband.spec.csv_tables import made_of, read_benchmark, read_table, write_csv

REPORTED = "reported/"  # a source with this prefix is a file of results/reported/: numbers from papers
SHIPPED = "shipped/"  # and with this one, all such files of results/reference/*/; no rows if there are none

OF_GPUS = f"{SHIPPED}kernels"  # rows of `lowband bench-kernel`, of every device shipped
COLLECTED = ("runs", "steps", "bytes", "states", "outside")  # written by `lowband collect`

# table -> its source tables, in the order of its `build`'s parameters
TABLES: dict[str, tuple[str, ...]] = {
    "scaling": ("runs", "steps"),
    "communication": ("bytes",),
    "memory": ("states",),
    "loss": ("runs", "steps"),
    "parity": ("runs", "loss"),
    "convergence": ("runs", "steps"),
    "convergence_curves": ("runs", "steps"),
    "peers": ("runs", "steps", "outside"),
    "peer_bytes": ("runs",),
    "box": ("runs",),
    "box_ratios": ("runs", "reported/01_frontier_low_bandwidth_2501.04266"),
    "box_links": ("comm",),
    "box_jobs": ("jobs",),
    "left_out": (f"{SHIPPED}folds", f"{SHIPPED}held_out"),
    "coverage": (f"{SHIPPED}folds", f"{SHIPPED}held_out"),
    "accuracy": ("validation", "constants", f"{SHIPPED}folds", f"{SHIPPED}held_out"),
    "softmax": ("softmax_times", "softmax_setup", "reported/04_two_pass_softmax_2001.04438"),
    "attention": (OF_GPUS, "reported/03_flashattention2_2307.08691"),
    "training_speed": (OF_GPUS, "reported/03_flashattention2_2307.08691"),
    "kernel_rates": (OF_GPUS,),
    "kernel_resources": ("compiled",),
    "faults": (f"{SHIPPED}injected",),
    "wan_losses": ("runs", "steps"),
    "wan_curves": ("runs", "steps", f"{SHIPPED}wan_steps"),
    "wan": ("runs", "steps", f"{SHIPPED}wan_steps"),
    "partners": ("runs", "steps", "bytes"),
    "load": (f"{SHIPPED}load",),
    "twice": (f"{SHIPPED}twice",),
    "anchors": (f"{SHIPPED}anchor_faults",),
    "stragglers": (f"{SHIPPED}trials",),
}

# Tables of a suite or benchmark that a reproduction may leave out: they are then made from its shipped raw
# tables in results/reference/
SUITE_OF = {
    "convergence": "convergence",
    "convergence_curves": "convergence",
    "peers": "peers",
    "peer_bytes": "peers",
    "box": "box",
    "box_ratios": "box",
    "box_links": "box-bench",
    "box_jobs": "box-bench",
    "kernel_resources": "kernels",
    **dict.fromkeys(("wan_losses", "wan_curves", "wan"), "wan"),
    "partners": "decentralised",
}

# Raw tables of this machine's benchmarks. The shipped ones are in one folder per machine, named after it.
OF_MACHINES = {raw: name for name, benchmark in BENCHMARKS.items() for raw in benchmark.tables}
SUITE_OF |= {
    table: OF_MACHINES[source] for table, sources in TABLES.items() for source in sources
    if source in OF_MACHINES
}  # fmt: skip
THIS_MACHINE = "local"


def is_made_by(suites: Iterable[str], suite: str) -> bool:
    """Whether `suites` contain `suite` or one of its variants (`<suite>-...`), to make its tables from."""
    return any(name == suite or name.startswith(f"{suite}-") for name in suites)


def raw_dir(table: str, suites: Iterable[str], own: Path, root: Path) -> Path:
    """The folder of a table's raw tables: `own` if a reproduction of `suites` makes them, else shipped ones.

    root: the folder that holds results/
    """
    suite = SUITE_OF.get(table)
    runs_with = BENCHMARKS[suite].suite if suite in BENCHMARKS else suite
    is_own = runs_with is None or is_made_by(suites, runs_with)
    return own if is_own else root / "results" / "reference" / str(suite)


def tables_of_runs(suites: Collection[str]) -> list[str]:
    """The tables that a reproduction of `suites` makes from its own runs and papers' numbers alone."""
    found: list[str] = []
    for table, sources in TABLES.items():
        suite = SUITE_OF.get(table)
        of_runs = all(source in (*COLLECTED, *found) or source.startswith(REPORTED) for source in sources)
        if of_runs and (suite is None or is_made_by(suites, suite)):
            found.append(table)
    return found


def source_paths(source: str, tables_dir: Path, root: Path) -> list[Path]:
    """The files of a source: one, or several if shipped. root: the folder that holds results/"""
    if source in OF_MACHINES and (several := sorted(tables_dir.glob(f"*/{source}.csv"))):
        return several
    if source.startswith(SHIPPED):
        return sorted((root / "results" / "reference").glob(f"*/{source.removeprefix(SHIPPED)}.csv"))
    return [(root / "results" if source.startswith(REPORTED) else tables_dir) / f"{source}.csv"]


def read_sources(table: str, tables_dir: Path, root: Path) -> list[pd.DataFrame]:
    """The arguments of a table's `build`. Raises UserError for raw tables that do not name their points."""
    return [read_source(source, tables_dir, root) for source in TABLES[table]]


def read_source(source: str, tables_dir: Path, root: Path) -> pd.DataFrame:
    """One source as a table; rows of a benchmark have their machine's name in `cluster`."""
    read = read_benchmark if source.startswith(SHIPPED) else read_table
    paths = source_paths(source, tables_dir, root)
    parts = [read(path) for path in paths]
    if source in COLLECTED and "point" not in parts[0]:
        again = "tables of this version's `lowband collect`: collect the run folders again"
        raise UserError("no column 'point'", where=paths[0], allowed=again)
    if source in OF_MACHINES:
        names = [THIS_MACHINE if path.parent == tables_dir else path.parent.name for path in paths]
        parts = [part.assign(cluster=name) for part, name in zip(parts, names, strict=True)]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def write_table(name: str, tables_dir: Path, out_dir: Path | None = None, root: Path = Path()) -> None:
    """Write `name`.csv from tables of `tables_dir` to `out_dir` (default: `tables_dir`).

    Raises UserError for a name that is not in TABLES, and for raw tables from which it cannot be made.
    """
    if name not in TABLES:
        raise UserError(f"no table '{name}'", allowed=TABLES)
    build = import_module(f"lowband.evidence.tables.derived.{name}").build
    sources = read_sources(name, tables_dir, root)
    with made_of(tables_dir):
        made = build(*sources)
    write_csv(made, (out_dir or tables_dir) / f"{name}.csv")
