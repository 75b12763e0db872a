"""The origin of the rows behind a claim: measured in this reproduction, computed by it, or shipped."""

from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from lowband.evidence.tables.build import raw_dir, read_source, source_paths
from lowband.evidence.tables.entries import OF_GPUS, TABLES
from lowband.evidence.tables.entries import SHIPPED as SHIPPED_SOURCE
from lowband.evidence.validation.tables import PREDICTED
from lowband.spec.benchmarks import RULES
from lowband.spec.csv_tables import read_table, sha256
from lowband.spec.records import Environment

HERE, SHIPPED, COMPUTED = ORIGINS = ("this run", "shipped", "computed")


class Origin(NamedTuple):
    """name: one of ORIGINS; folder: that of the raw tables behind a table; raw: their first, if shipped."""

    name: str
    folder: Path
    raw: Path | None = None

    def machine(
        self, evidence: str, suite: str | None, clusters: Collection[str] = (), devices: Collection[str] = ()
    ) -> tuple[str, str]:
        """Devices and abbreviated commits of the rows of this evidence, suite, clusters, devices (none: all).

        Of a table whose rows name no commit, all that commits.csv has.

        Empty for computed rows, which do not depend on the machine. Where no row is of this evidence or of
        these clusters, a prediction was joined with what these rows measured.
        """
        if self.name == COMPUTED:
            return "", ""
        rows = _environments(self.folder, self.raw)
        asked: dict[str, Collection[str | None]] = {
            "provenance": [evidence],
            "suite": [suite],
            "cluster": clusters,
            "device": devices,
        }
        for column, wanted in asked.items():
            if column in rows and rows[column].isin(wanted).any():
                rows = rows[rows[column].isin(wanted)]
        named, commits = (list(dict.fromkeys(rows[column].dropna())) for column in ("device", "commit"))
        commits = _listed(self.raw) or commits
        return " and ".join(named), " ".join(commit[:7] for commit in commits)


def is_shipped(tables_dir: Path, root: Path) -> bool:
    """Whether the runs of a reproduction are those of results/reference, wall times included."""
    own, shipped = tables_dir / "runs.csv", root / "results" / "reference" / "local" / "tables" / "runs.csv"
    return own.is_file() and shipped.is_file() and sha256(own) == sha256(shipped)


def origin(table: str, tables_dir: Path, root: Path) -> Origin:
    """The origin of the rows of a table in `tables_dir`. root: the folder that holds results/"""
    sources = TABLES[table].sources if table in TABLES else ()
    if {table, *sources} & set(PREDICTED):
        return Origin(COMPUTED, tables_dir)
    if OF_GPUS in sources:
        return Origin(SHIPPED, root)
    if sources and sources[0].startswith(SHIPPED_SOURCE):
        raw = source_paths(sources[0], tables_dir, root)[0]
        return Origin(SHIPPED, raw.parent, raw)
    is_all_shipped = is_shipped(tables_dir, root)
    suites = [] if is_all_shipped else set(read_table(tables_dir / "runs.csv")["suite"])
    folder = raw_dir(table, suites, tables_dir, root)
    if is_all_shipped or folder != tables_dir:
        return Origin(SHIPPED, folder, folder / f"{sources[0]}.csv" if sources else None)
    return Origin(HERE, folder)


def _environments(folder: Path, raw: Path | None) -> pd.DataFrame:
    """Rows with a device and a commit: of runs, of kernels on GPUs, of a benchmark, or of a campaign.

    A campaign's env.json is of its last start, so the commits are those of its rows where they have any.
    """
    if source_paths(OF_GPUS, folder, folder):
        return read_source(OF_GPUS, folder, folder)
    if (folder / "runs.csv").is_file():
        return read_table(folder / "runs.csv")
    for rule in RULES.values():
        if source_paths(rule.setup, folder, folder)[0].is_file():
            return read_source(rule.setup, folder, folder)
    environment = Environment.read_json(folder / "env.json")
    rows = pd.DataFrame() if raw is None else read_table(raw)
    commits = rows["commit"].unique() if "commit" in rows else [environment.commit]
    return pd.DataFrame([{"device": environment.device, "commit": commit} for commit in commits])


def _listed(raw: Path | None) -> list[str]:
    """Commits of a shipped table that names none, as results/reference/commits.csv has them."""
    if raw is None:
        return []
    for folder in raw.parents:
        if (folder / "commits.csv").is_file():
            table = read_table(folder / "commits.csv")
            return list(table[table["file"] == raw.relative_to(folder).as_posix()]["commit"])
    return []
