"""The runs that a claim expects, from the suites they belong to, and those of them that did not end ok."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from lowband.errors import UserError
from lowband.evidence.tables.collect import run_keys
from lowband.spec.config import Config
from lowband.spec.run import RunSpec

Value = bool | str | int | float
Wanted = dict[str, Value | tuple[Value, ...]]  # column -> the value that a row must have, or one of several

_NAMED = 2  # runs of each cause that a reason names; the column `lacking` has all


def one_of(wanted: Value | tuple[Value, ...]) -> tuple[Value, ...]:
    return wanted if isinstance(wanted, tuple) else (wanted,)


class Lack(NamedTuple):
    """The runs that a claim lacks. expected: number of runs it expects; runs: run id -> status and cause."""

    expected: int
    runs: dict[str, str]

    @property
    def why(self) -> str:
        """One line: how many runs, by cause, and the names of the first of each."""
        by_cause: dict[str, list[str]] = {}
        for run, cause in self.runs.items():
            by_cause.setdefault(cause, []).append(run)
        parts = []
        for cause, runs in by_cause.items():
            more = f" and {len(runs) - _NAMED} more" if len(runs) > _NAMED else ""
            parts.append(f"{len(runs)} {cause} ({', '.join(runs[:_NAMED])}{more})")
        return f"of {self.expected} runs: {'; '.join(parts)}"


def find_lack(wanted: Wanted, evidence: str, runs: pd.DataFrame, root: Path, where: str) -> Lack:
    """The runs of the suites in `runs` that match `wanted` and `evidence`, compared with how they ended.

    runs: a runs.csv. A point for which a peer has no counterpart is not expected. root: the folder that holds
    config/. Raises UserError for a key of `wanted` that is not an attribute of a run.
    """
    ended = runs.fillna({"cause": ""}).set_index("run_id")
    expected: list[str] = []
    for suite in dict.fromkeys(runs["suite"]):
        for run_id, row in _points(root, suite).items():
            if unknown := sorted(set(wanted) - set(row)):
                raise UserError(f"expects: no key '{unknown[0]}'", where=where, allowed=row)
            if row["provenance"] == evidence and all(row[key] in one_of(wanted[key]) for key in wanted):
                expected.append(run_id)
    lacking = {}
    for run_id in expected:
        if run_id not in ended.index:
            lacking[run_id] = "missing"
        elif ended.loc[run_id, "status"] != "ok":
            status, cause = ended.loc[run_id, ["status", "cause"]]
            lacking[run_id] = f"{status}, {cause}" if cause else str(status)
    return Lack(len(expected), lacking)


@cache  # a hundred claims use a handful of suites
def _points(root: Path, suite: str) -> Mapping[str, Mapping[str, Value]]:
    """run id -> attributes of each run of the suite that its engine can do."""
    return {
        spec.run_id: run_keys(spec) | {"accumulation": spec.accumulation}
        for spec in Config(root).runs([suite])
        if _has_counterpart(spec)
    }


def _has_counterpart(spec: RunSpec) -> bool:
    try:
        spec.check_engine()
    except UserError:
        return False
    return True
