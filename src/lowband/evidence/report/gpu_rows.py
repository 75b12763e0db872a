"""Rows of `lowband gpu` put among the shipped ones, and the claims that they change."""

import json
import shutil
import subprocess
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from lowband.bench.gpu.families import FAMILIES, sources_sha256
from lowband.bench.gpu.folder import ENVIRONMENT, ROWS, Folder
from lowband.bench.gpu.programs import RUNS, SUITES, TESTS
from lowband.errors import UserError
from lowband.evidence.claims.claim import read_claims
from lowband.evidence.claims.grade import grade_claims
from lowband.evidence.report.verify import write_sums
from lowband.evidence.tables.build import write_table
from lowband.evidence.tables.collect import collect
from lowband.evidence.tables.entries import OF_GPUS, TABLES
from lowband.spec.files import write_whole
from lowband.spec.plain_data import parse_json, read_text
from lowband.spec.run import RunSpec

COSTS = "costs.json"  # of items: what the next call on such a device goes by
OF_RUNS = ("runs", "steps", "states")  # tables of whole runs that are shipped
GIT_LIMIT_S = 10


def install(source: Path, to: Path, root: Path, families: Collection[str] = tuple(FAMILIES)) -> Iterator[str]:
    """Write the rows of a folder of `lowband gpu` to the shipped folder `to`; yields what changed, by line.

    root: the tree, in a git repository. Of these families only; what was not run keeps its shipped rows.
    Raises UserError, and writes nothing, for rows of another device, of a commit that is not in this history,
    of other files than today's, for items that failed, and if nothing is left to write.
    """
    folder = Folder.read(source)
    chosen = {name: entry for name, entry in folder.entries.items() if entry.family in families}
    folder.entries = {name: entry for name, entry in chosen.items() if entry.outcome != "not run"}
    missing = Counter(entry.family for entry in chosen.values() if entry.outcome == "not run")
    _check(folder, to, root)
    before = _verdicts(root)
    _write(folder, missing, to, root)
    write_sums(root)
    yield f"{len(folder.entries)} items of {folder.environment['device']} at {folder.environment['commit']}"
    if missing:
        told = ", ".join(f"{count} of {family}" for family, count in missing.items())
        yield f"not run, shipped rows stay: {told}"
    for claim, verdict in _verdicts(root).items():
        if verdict != before[claim]:
            yield f"{claim}: {before[claim]} -> {verdict}"


def _check(folder: Folder, to: Path, root: Path) -> None:
    shipped = to / ENVIRONMENT
    if shipped.exists() and (there := _json(shipped)["device"]) != folder.environment["device"]:
        raise UserError(f"rows of {folder.environment['device']}", where=to, allowed=there)
    commit = folder.environment["commit"]
    if folder.environment.get("dirty") or not _is_in_history(commit, root):
        raise UserError(
            f"rows of commit {commit}, which is not in this history, or of files changed after it",
            where=folder.path, allowed="rows of a commit that has landed",
        )  # fmt: skip
    if not folder.entries:
        raise UserError("nothing was run of these families", where=folder.path, allowed=", ".join(FAMILIES))
    for name, entry in folder.entries.items():
        if entry.outcome != "ok":
            raise UserError(
                f"{name}: {entry.outcome}: {entry.reason}", where=folder.path,
                allowed="items that ended well, or --only other families",
            )  # fmt: skip
        if entry.sources_sha256 != sources_sha256(entry.family, root):
            raise UserError(
                f"{name}: measured other files than today's", where=folder.path, allowed="run it again"
            )


def _is_in_history(commit: str, root: Path) -> bool:
    command = ["git", "-C", str(root), "merge-base", "--is-ancestor", "--end-of-options", commit, "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, timeout=GIT_LIMIT_S, check=False).returncode == 0
    except (OSError, subprocess.SubprocessError):
        return False


def _write(folder: Folder, cut: Collection[str], to: Path, root: Path) -> None:
    """cut: families of which some items were not run"""
    families = {entry.family for entry in folder.entries.values()}
    found = _measured(folder, families)
    if (to / ROWS).exists():
        shipped = _rows(to / ROWS)
        key = list(found.columns[: found.columns.get_loc("outcome")])
        is_old = shipped["part"].isin(families.difference(cut))  # their cases may be others than before
        is_old |= pd.MultiIndex.from_frame(shipped[key]).isin(pd.MultiIndex.from_frame(found[key]))
        found = pd.concat([shipped[~is_old], found])
    write_whole(to / ROWS, found.to_csv(index=False, lineterminator="\n"))
    write_whole(to / ENVIRONMENT, json.dumps(folder.environment, indent=2) + "\n")
    costs = _json(to / COSTS) if (to / COSTS).exists() else {}
    costs |= {name: round(entry.seconds, 2) for name, entry in folder.entries.items()}
    write_whole(to / COSTS, json.dumps(costs, indent=1, sort_keys=True) + "\n")
    if "tests" in families:
        _write_reports(sorted(folder.path.glob("tests-*.xml")), to / "tests.txt")
    if "overhead" in families:
        shutil.copyfile(folder.path / "overhead.json", to / "overhead.json")
    if "steps" in families:
        steps = root / "results" / "reference" / "compile" / to.name
        steps.mkdir(parents=True, exist_ok=True)
        for path in (folder.path / "compile").iterdir():
            shutil.copyfile(path, steps / path.name)
    if "mfu" in families:
        _write_shares([_rows(path) for path in sorted(folder.path.glob("mfu/*/mfu.csv"))], to / "mfu.csv")
    runs = [folder.path / "runs" / name for name, entry in folder.entries.items() if entry.family == RUNS]
    for suite in SUITES:
        if found_runs := [run for run in runs if RunSpec.read_json(run / "spec.json").suite == suite]:
            _write_runs(found_runs, to.with_name(to.name + suite.removeprefix(RUNS)))


def _write_shares(found: Sequence[pd.DataFrame], to: Path) -> None:
    """The steps of each model, in place of those of the same one."""
    models = {model for rows in found for model in rows["model"]}
    shipped = [_rows(to)] if to.exists() else []
    rows = pd.concat([*(rows[~rows["model"].isin(models)] for rows in shipped), *found])
    write_whole(to, rows.sort_values("model", kind="stable").to_csv(index=False, lineterminator="\n"))


def _write_reports(reports: Sequence[Path], to: Path) -> None:
    """A line for each report of pytest, among those of others: no others if all are there."""
    told = {path.stem: _told(path) for path in reports}
    is_cut = {f"tests-{name}" for name in TESTS} - set(told)
    lines = to.read_text(encoding="utf-8").splitlines() if is_cut and to.exists() else []
    others = [line for line in lines if line.partition(":")[0] not in told]
    write_whole(to, "".join(f"{line}\n" for line in [*others, *told.values()]))


def _write_runs(runs: Sequence[Path], to: Path) -> None:
    """The tables of whole runs, each row in place of those of the same run."""
    to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as tables:
        collect(list(runs), Path(tables))
        for name in OF_RUNS:
            found, file = _rows(Path(tables, f"{name}.csv")), to / f"{name}.csv"
            if file.exists():
                shipped = _rows(file)
                is_old = shipped["run_id"].isin([run.name for run in runs])
                found = pd.concat([shipped[~is_old], found]).fillna("")
            write_whole(file, found.to_csv(index=False, lineterminator="\n"))


def _rows(file: Path) -> pd.DataFrame:
    """Every cell as it is written."""
    return pd.read_csv(file, dtype=object, keep_default_na=False)


def _measured(folder: Folder, families: Collection[str]) -> pd.DataFrame:
    """The rows of what ended well: a case that was not run, or of another family, is left out."""
    rows = _rows(folder.path / ROWS)
    return rows[rows["part"].isin(families) & (rows["outcome"] != "not run")]


def _json(path: Path) -> Any:
    return parse_json(read_text(path), path)


def _told(path: Path) -> str:
    """A line for a report of pytest."""
    suite = ET.parse(path).getroot().find("testsuite")
    assert suite is not None, path
    counts = " ".join(f"{key} {suite.get(key)}" for key in ("tests", "failures", "errors", "skipped"))
    return f"{path.stem}: {counts} seconds {suite.get('time')}"


def _verdicts(root: Path) -> dict[str, str]:
    """The verdict of each claim that rests on shipped rows of GPUs alone."""
    tables = [name for name, table in TABLES.items() if OF_GPUS in table.sources]
    claims = root / "config" / "claims.yaml"
    only = [
        claim.id for claim in read_claims(claims)
        if claim.queries and all(query.table in tables for query in claim.queries)
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        for name in tables:
            write_table(name, Path(folder), root=root)
        graded = grade_claims(claims, Path(folder), only, root)
    return dict(zip(graded["id"], graded["verdict"], strict=True))
