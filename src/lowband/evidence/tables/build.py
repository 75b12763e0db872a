"""Raw tables -> derived tables, by name: where the sources of an entry are, and how it is written."""

import ast
from collections.abc import Callable, Collection, Iterable
from functools import cache
from pathlib import Path

import pandas as pd

from lowband.errors import UserError
from lowband.evidence.tables.entries import COLLECTED, OF_GPUS, REPORTED, SHIPPED, TABLES, code_at
from lowband.spec.benchmarks import BENCHMARKS, RULES
from lowband.spec.csv_tables import made_of, read_benchmark, read_table, write_csv

# Raw tables of this machine's benchmarks. The shipped ones are in one folder per machine, named after it.
OF_MACHINES = {raw: name for name in RULES for raw in BENCHMARKS[name].tables}
SUITE_OF = {name: table.suite for name, table in TABLES.items() if table.suite is not None}
THIS_MACHINE = "local"
PACKAGE = Path(__file__).parents[2]
OF_NUMBERS = ("evidence", "cost", "predict")  # parts of the package whose formulas tables use


def is_made_by(suites: Iterable[str], suite: str) -> bool:
    """Whether `suites` contain `suite` or one of its variants (`<suite>-...`), to make its tables from."""
    return any(name == suite or name.startswith(f"{suite}-") for name in suites)


def raw_dir(table: str, suites: Iterable[str], own: Path, root: Path) -> Path:
    """The folder of a table's raw tables: `own` if a reproduction of `suites` makes them, else shipped ones.

    root: the folder that holds results/
    """
    suite = SUITE_OF.get(table)
    runs_with = RULES[suite].suite if suite in RULES else suite
    is_own = runs_with is None or is_made_by(suites, runs_with)
    return own if is_own else root / "results" / "reference" / str(suite)


def tables_of_runs(suites: Collection[str]) -> list[str]:
    """The tables that a reproduction of `suites` makes from its own runs and papers' numbers alone."""
    found: list[str] = []
    for name, table in TABLES.items():
        of_runs = all(
            source in (*COLLECTED, *found) or source.startswith(REPORTED) for source in table.sources
        )
        if of_runs and (table.suite is None or is_made_by(suites, table.suite)):
            found.append(name)
    return found


def source_paths(source: str, tables_dir: Path, root: Path) -> list[Path]:
    """The files of a source: one, or several if shipped. root: the folder that holds results/

    Of kernels: those in folders of `tables_dir`, one for each machine, if there are any.
    """
    own = source.removeprefix(SHIPPED) if source == OF_GPUS else source
    if (source == OF_GPUS or source in OF_MACHINES) and (several := sorted(tables_dir.glob(f"*/{own}.csv"))):
        return several
    if source.startswith(SHIPPED):
        name = source.removeprefix(SHIPPED)
        return sorted((root / "results" / "reference").glob(f"{name if '/' in name else f'*/{name}'}.csv"))
    return [(root / "results" if source.startswith(REPORTED) else tables_dir) / f"{source}.csv"]


def read_sources(table: str, tables_dir: Path, root: Path) -> list[pd.DataFrame]:
    """The arguments of a table's `build`. Raises UserError for raw tables that do not name their points."""
    return [read_source(source, tables_dir, root) for source in TABLES[table].sources]


def read_source(source: str, tables_dir: Path, root: Path) -> pd.DataFrame:
    """One source as a table.

    Rows of a benchmark have their machine's name in `cluster`, those of a source with a * their `folder`.
    """
    read = read_benchmark if source.startswith(SHIPPED) else read_table
    paths = source_paths(source, tables_dir, root)
    parts = [read(path) for path in paths]
    if source in COLLECTED and "point" not in parts[0]:
        again = "tables of this version's `lowband collect`: collect the run folders again"
        raise UserError("no column 'point'", where=paths[0], allowed=again)
    if "*" in source:
        parts = [part.assign(folder=path.parent.name) for part, path in zip(parts, paths, strict=True)]
    if source in OF_MACHINES:
        names = [THIS_MACHINE if path.parent == tables_dir else path.parent.name for path in paths]
        parts = [part.assign(cluster=name) for part, name in zip(parts, names, strict=True)]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()


def builder(name: str) -> Callable[..., pd.DataFrame]:
    """Source tables -> the table: a pure function. Raises UserError for an entry whose code is not there."""
    view = TABLES[name].view
    if view is not None:
        return lambda *sources: view.rows(pd.concat(sources, ignore_index=True))
    build: Callable[..., pd.DataFrame] = code_at(*TABLES[name].place, f"tables.yaml: {name}")
    return build


def code_of(name: str) -> list[str]:
    """The files below src/lowband whose change calls for a new table."""
    if TABLES[name].view is not None:
        return ["evidence/tables/tables.yaml", "evidence/tables/view.py"]
    module = TABLES[name].place[0].replace(".", "/")
    always = {"evidence/tables/derived/__init__.py", "evidence/tables/points.py"}
    return sorted(always | _with_imports(f"evidence/{module}.py"))


def reads_config(name: str) -> bool:
    """Whether a table is also made of the files of machines, models, schemes and software."""
    files = [PACKAGE / file for file in code_of(name) if file.endswith(".py")]
    return any("lowband.spec.config" in file.read_text(encoding="utf-8") for file in files)


def _with_imports(file: str) -> set[str]:
    """A file and those of OF_NUMBERS that it imports, directly or by another one."""
    found, waiting = set[str](), {file}
    while waiting:
        found.add(file := waiting.pop())
        waiting |= _imports_of(file) - found
    return found


@cache
def _imports_of(file: str) -> frozenset[str]:
    found = set[str]()
    for node in ast.walk(ast.parse((PACKAGE / file).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lowband."):
            base = (node.module or "").removeprefix("lowband.").replace(".", "/")
            found |= {f"{base}.py", f"{base}/__init__.py", *(f"{base}/{each.name}.py" for each in node.names)}
    return frozenset(each for each in found if each.startswith(OF_NUMBERS) and (PACKAGE / each).is_file())


def write_table(name: str, tables_dir: Path, out_dir: Path | None = None, root: Path = Path()) -> None:
    """Write `name`.csv from tables of `tables_dir` to `out_dir` (default: `tables_dir`).

    Raises UserError for a name that is not in TABLES, and for raw tables from which it cannot be made.
    """
    if name not in TABLES:
        raise UserError(f"no table '{name}'", allowed=TABLES)
    sources = read_sources(name, tables_dir, root)
    with made_of(tables_dir):
        made = builder(name)(*sources)
    write_csv(made, (out_dir or tables_dir) / f"{name}.csv")
