"""Add `point`, `condition` and every option of a run to shipped raw tables that an older `collect` wrote.

    python workflow/scripts/add_points.py results/reference/box ...

The specs are made from config/ and slurm/ as of each row's own commit. No cell is changed. Exits with an
error, with nothing written, if a run is not in its commit's suites or differs from its spec in any column
that both have.
"""

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pandas as pd

from lowband.evidence.tables.collect import KEYS, run_keys
from lowband.evidence.tables.entries import COLLECTED
from lowband.evidence.tables.points import identity
from lowband.spec.config import Config
from lowband.spec.csv_tables import write_csv


def specs_at(commit: str, suite: str) -> dict[str, dict[str, Any]]:
    """run_id -> the columns that follow from its spec, with the suite as of the commit."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", commit, "config", "slurm"], check=True, capture_output=True
        ).stdout
        subprocess.run(["tar", "x", "-C", folder], input=archive, check=True)
        return {spec.run_id: run_keys(spec) | identity(spec) for spec in Config(Path(folder)).runs([suite])}


def add_points(folder: Path) -> None:
    runs = read(folder / "runs.csv")
    added: dict[str, dict[str, str]] = {}
    for suite, rows in runs.groupby("suite"):
        # A run that was not started has no commit, so all commits of its suite must agree.
        for commit in sorted(set(rows["commit"]) - {""}):
            specs = specs_at(commit, str(suite))
            for _, row in rows[rows["commit"].isin(["", commit])].iterrows():
                columns = {key: str(value) for key, value in specs[row["run_id"]].items()}
                differ = [key for key in columns if key in row and row[key] != columns[key]]
                if differ or added.setdefault(row["run_id"], columns) != columns:
                    sys.exit(f"{folder}: {row['run_id']} differs from its spec at {commit}: {differ}")
    for name in COLLECTED:
        path = folder / f"{name}.csv"
        if path.exists():
            table = read(path)
            write_csv(with_columns(table, added, everything=name == "runs"), path)
            assert read(path)[list(table)].equals(table)


def with_columns(table: pd.DataFrame, added: dict[str, dict[str, str]], everything: bool) -> pd.DataFrame:
    columns = list(next(iter(added.values()))) if everything else KEYS
    found = {key: [added[run][key] for run in table["run_id"]] for key in columns}
    rest = [column for column in table if column not in found]
    return pd.concat([pd.DataFrame(found), table[rest]], axis=1)


def read(path: Path) -> pd.DataFrame:
    return pd.read_csv(path, dtype=str, keep_default_na=False)


for argument in sys.argv[1:]:
    add_points(Path(argument))
