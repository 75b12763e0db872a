"""Rows of `lowband gpu` among the shipped ones: what is refused, what is written, and which claims change."""

import json
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from lowband.bench.gpu.families import sources_sha256
from lowband.bench.gpu.folder import Entry, Folder
from lowband.bench.gpu.programs import TESTS
from lowband.errors import UserError
from lowband.evidence.report.gpu_rows import install
from lowband.evidence.report.verify import verify
from lowband.spec.config import Config
from lowband.spec.files import write_whole
from tests.checkout import REFERENCE, ROOT

COUNTS = 'tests="50" failures="0" errors="0" skipped="0" time="57.1"'
REPORT = f'<testsuites><testsuite name="pytest" {COUNTS}/></testsuites>'


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def tree(tmp_path: Path, needs_git: None) -> Path:
    """A repository with the shipped rows of the H100 alone."""
    root = tmp_path / "tree"
    (root / "results" / "reference").mkdir(parents=True)
    for name in ("config", "src", "tests"):
        (root / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "results" / "reported", root / "results" / "reported")
    shutil.copytree(REFERENCE / "h100", root / "results" / "reference" / "h100")
    git(root, "init", "--quiet")
    git(root, "commit", "--quiet", "--allow-empty", "-m", "one")
    return root


@pytest.fixture
def folder(tree: Path, tmp_path: Path) -> Folder:
    """A call's folder with the shipped ceilings and rows of block quantization, as fast as a copy."""
    shipped = tree / "results" / "reference" / "h100"
    environment = json.loads((shipped / "environment.json").read_text())
    begun = Folder.begin(tmp_path / "gpu", environment | {"commit": git(tree, "rev-parse", "HEAD")}, None)
    rows = pd.read_csv(shipped / "kernels.csv", dtype=object, keep_default_na=False)
    rows = rows.drop(columns=["device", "torch", "triton", "commit", "measurement_version"])
    for part in ("ceilings", "block_quant"):
        found = rows[rows["part"] == part].to_dict("records")
        for row in found:
            if row["bytes"]:
                row["time_s"] = int(row["bytes"]) / 3e12
        begun.keep(f"all of {part}", Entry.of(part, "ok", "", 12.345, found))
    for family in ("tests", "overhead"):
        begun.keep(f"all of {family}", Entry.of(family, "ok", "", 12.345, []))
    for name in TESTS:
        (begun.path / f"tests-{name}.xml").write_text(REPORT)
    (begun.path / "overhead.json").write_text("{}\n")
    return begun


def refused(folder: Folder, tree: Path, to: str = "h100") -> str:
    before = {path: path.read_bytes() for path in (tree / "results").rglob("*") if path.is_file()}
    with pytest.raises(UserError) as told:
        list(install(folder.path, tree / "results" / "reference" / to, tree))
    assert before == {path: path.read_bytes() for path in (tree / "results").rglob("*") if path.is_file()}
    return str(told.value)


def test_rows_take_the_place_of_the_shipped_ones(folder: Folder, tree: Path) -> None:
    to = tree / "results" / "reference" / "h100"
    before = pd.read_csv(to / "kernels.csv", dtype=object, keep_default_na=False)
    costs = json.loads((to / "costs.json").read_text())
    told = list(install(folder.path, to, tree))
    commit = git(tree, "rev-parse", "HEAD")
    flipped = [
        f"{claim}: not met -> met"
        for claim in ("quantized-hop-gain-small", "quantization-near-copy-sum-encode")
    ]
    assert told == [f"4 items of NVIDIA H100 80GB HBM3 at {commit}", *flipped]
    after = pd.read_csv(to / "kernels.csv", dtype=object, keep_default_na=False)
    is_new = after["part"].isin(["ceilings", "block_quant"])
    assert (after["commit"] == commit).tolist() == is_new.tolist()
    others = before[~before["part"].isin(["ceilings", "block_quant"])].reset_index(drop=True)
    assert after[~is_new].reset_index(drop=True).equals(others)
    assert len(after) == len(before)
    assert json.loads((to / "environment.json").read_text())["commit"] == commit
    assert json.loads((to / "costs.json").read_text()) == costs | {
        f"all of {family}": 12.35 for family in ("ceilings", "block_quant", "tests", "overhead")
    }  # fmt: skip
    assert (to / "tests.txt").read_text() == "".join(
        f"tests-{name}: tests 50 failures 0 errors 0 skipped 0 seconds 57.1\n" for name in sorted(TESTS)
    )
    assert (to / "overhead.json").read_text() == "{}\n"
    assert verify(tree)[1] == []


def test_rows_of_another_device_are_refused(folder: Folder, tree: Path) -> None:
    other = tree / "results" / "reference" / "h200"
    shutil.copytree(REFERENCE / "h200", other)
    assert refused(folder, tree, "h200") == f"{other}: rows of NVIDIA H100 80GB HBM3 (allowed: NVIDIA H200)"


@pytest.mark.parametrize("change", [{"commit": "1" * 40}, {"commit": "--all"}, {"dirty": True}])
def test_rows_of_no_commit_of_this_history_are_refused(
    folder: Folder, tree: Path, change: dict[str, object]
) -> None:
    path = folder.path / "environment.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert "not in this history" in refused(folder, tree)


def test_rows_of_other_files_are_refused(folder: Folder, tree: Path) -> None:
    entry = folder.entries["all of block_quant"]
    folder.keep("all of block_quant", replace(entry, sources_sha256=sources_sha256("softmax")))
    assert "all of block_quant: measured other files than today's" in refused(folder, tree)


def test_items_that_failed_are_refused_unless_other_families_are_named(folder: Folder, tree: Path) -> None:
    entry = folder.entries["all of tests"]
    folder.keep("all of tests", replace(entry, outcome="error", reason="why"))
    assert "all of tests: error: why (allowed: items that ended well, or --only" in refused(folder, tree)
    to = tree / "results" / "reference" / "h100"
    told = (to / "tests.txt").read_bytes()
    list(install(folder.path, to, tree, ["ceilings", "block_quant"]))
    assert (to / "tests.txt").read_bytes() == told
    assert "all of tests" not in json.loads((to / "costs.json").read_text())


def test_what_was_not_run_keeps_its_shipped_rows(folder: Folder, tree: Path) -> None:
    """Of one family a part was run: those rows are replaced, each by its own, and no other one leaves."""
    to = tree / "results" / "reference" / "h100"
    before = pd.read_csv(to / "kernels.csv", dtype=object, keep_default_na=False)
    entry = folder.entries["all of block_quant"]
    rows, rest = entry.rows[:20], [row | {"outcome": "not run"} for row in entry.rows[20:]]
    folder.keep("all of block_quant", replace(entry, rows=rows))
    folder.keep("rest of block_quant", replace(entry, outcome="not run", rows=rest))
    folder.keep("overhead", replace(folder.entries["all of overhead"], outcome="not run"))
    told = list(install(folder.path, to, tree))
    assert told[1] == "not run, shipped rows stay: 1 of block_quant, 1 of overhead"
    after = pd.read_csv(to / "kernels.csv", dtype=object, keep_default_na=False)
    assert len(after) == len(before)
    counts = (after["commit"] == git(tree, "rev-parse", "HEAD")).groupby(after["part"]).sum()
    assert counts["block_quant"] == 20
    assert counts["attention"] == 0
    assert not (after["outcome"] == "not run").any()


def test_runs_and_reports_that_were_not_made_keep_what_is_shipped(folder: Folder, tree: Path) -> None:
    """Each suite has its own folder; the specs of runs that were not begun lie beside those of others."""
    to = tree / "results" / "reference" / "h100"
    host = shutil.copytree(REFERENCE / "h100-host", to.with_name("h100-host"))
    for name in ("attention", "kernels"):
        (folder.path / f"tests-{name}.xml").unlink()
    (to / "tests.txt").write_text("tests-attention: an earlier line\ntests-engine: another\n")
    tables = [at / f"{name}.csv" for at in (to, host) for name in ("runs", "steps", "states")]
    before = {path: pd.read_csv(path, dtype=object, keep_default_na=False) for path in tables}
    for number, run in enumerate(Config(ROOT).runs(["one-gpu", "one-gpu-host"])):
        write_whole(folder.path / "runs" / run.run_id / "spec.json", run.to_json())
        if number == 0:
            folder.keep(run.run_id, Entry.of("one-gpu", "ok", "", 12.3, []))
            made = run.run_id
    list(install(folder.path, to, tree))
    for path, rows in before.items():
        after = pd.read_csv(path, dtype=object, keep_default_na=False)
        kept = rows[rows["run_id"] != made].reset_index(drop=True)
        assert after.iloc[: len(kept)][rows.columns].equals(kept)
        assert set(after.iloc[len(kept) :]["run_id"]) == ({made} if path == to / "runs.csv" else set())
    assert made in set(before[to / "runs.csv"]["run_id"])
    assert [line.partition(":")[0] for line in (to / "tests.txt").read_text().splitlines()] == [
        "tests-attention", "tests-engine",
    ]  # fmt: skip


def test_shares_of_the_peak_take_the_place_of_their_own_models_alone(folder: Folder, tree: Path) -> None:
    to = tree / "results" / "reference" / "h100"
    shipped = (to / "mfu.csv").read_text()
    larger = shipped.replace("gpt-1.3b", "gpt-2.7b")
    for _ in range(2):
        write_whole(folder.path / "mfu" / "gpt-2.7b" / "mfu.csv", larger)
        folder.keep("mfu gpt-2.7b", Entry.of("mfu", "ok", "", 12.3, []))
        list(install(folder.path, to, tree))
        assert (to / "mfu.csv").read_text() == shipped + larger.partition("\n")[2]


def test_a_folder_without_any_row_is_refused(folder: Folder, tree: Path) -> None:
    for name, entry in list(folder.entries.items()):
        folder.keep(name, replace(entry, outcome="not run"))
    assert "nothing was run of these families" in refused(folder, tree)
