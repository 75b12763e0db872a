"""Several runs in one job: what is run, what is left, what continues."""

import hashlib
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from lowband.model.data import read_corpus
from lowband.run.several import end_of_job, has_ended, run_several
from lowband.spec.files import write_whole
from lowband.spec.records import Environment, Outcome
from lowband.spec.run_folder import RunFolder
from tests.checkout import CONFIG

SPECS = CONFIG.runs(["smoke"])[:3]
FOREVER = float("inf")

# In place of `slurm/launch.sh ...`: notes the run, and ends it as the file `ends` in its folder says.
LAUNCH = """#!/bin/sh
folder=$(dirname "$5")
echo "$(basename "$folder")" >> "$STARTED"
echo "says $*"
if [ -e "$folder/hangs" ]; then
  trap 'touch "$folder/was-told"; exit 1' TERM
  touch "$folder/runs"
  while :; do sleep 0.05; done
fi
[ -e "$folder/breaks" ] && exit 7
cp "$OUTCOME" "$folder/outcome.json"
"""


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    launch = tmp_path / "launch"
    launch.write_text(LAUNCH)
    launch.chmod(0o755)
    (tmp_path / "ok.json").write_text(Outcome(status="ok", steps=3).to_json())
    monkeypatch.setenv("STARTED", str(tmp_path / "started"))
    monkeypatch.setenv("OUTCOME", str(tmp_path / "ok.json"))
    made = []
    for spec in SPECS:
        folder = tmp_path / "runs" / spec.run_id
        folder.mkdir(parents=True)
        write_whole(folder / "spec.json", spec.to_json())
        made.append(folder)
    return made


def started(folders: list[Path]) -> list[int]:
    """Indices of the runs that were started since the last call."""
    notes = folders[0].parents[1] / "started"
    names = notes.read_text().split() if notes.exists() else []
    notes.unlink(missing_ok=True)
    return [[folder.name for folder in folders].index(name) for name in names]


def go(folders: list[Path], ends: float = FOREVER) -> list[str]:
    return run_several([str(folders[0].parents[1] / "launch")], folders, folders[0].parents[1] / "logs", ends)


def test_all_follow_each_other_and_are_marked(folders: list[Path]) -> None:
    assert go(folders) == []
    assert started(folders) == [0, 1, 2]
    for folder in folders:
        outcome = folder / "outcome.json"
        checksum = hashlib.sha256(outcome.read_bytes()).hexdigest()
        assert (folder / "trained").read_text() == f"{checksum}  {outcome}\n"  # as sha256sum prints
    log = folders[0].parents[1] / "logs" / f"{folders[0].name}.log"
    assert log.read_text() == f"says python -m lowband train {folders[0] / 'spec.json'}\n"


def test_a_damaged_spec_keeps_no_other_from_running(folders: list[Path]) -> None:
    (folders[1] / "spec.json").write_text("{")
    [wrong] = go(folders)
    assert wrong.startswith(f"{folders[1].name}: {folders[1] / 'spec.json'}:1: is not JSON")
    assert started(folders) == [0, 2]


def test_a_failed_run_keeps_no_other_from_running_and_alone_runs_again(folders: list[Path]) -> None:
    (folders[1] / "breaks").touch()
    [line] = go(folders)
    assert line.startswith(f"{folders[1].name}: exit code 7: ")
    assert [(folder / "trained").exists() for folder in folders] == [True, False, True]
    assert started(folders) == [0, 1, 2]
    for folder in folders:  # as Snakemake removes outputs before a job
        (folder / "trained").unlink(missing_ok=True)
    (folders[1] / "breaks").unlink()
    assert go(folders) == []
    assert started(folders) == [1]
    assert all((folder / "trained").exists() for folder in folders)


def test_a_changed_spec_runs_again(folders: list[Path]) -> None:
    go(folders)
    started(folders)
    later = time.time_ns() + 10**9
    os.utime(folders[2] / "spec.json", ns=(later, later))
    assert not has_ended(RunFolder(folders[2]))
    go(folders)
    assert started(folders) == [2]


@pytest.mark.parametrize(
    ("status", "is_row"), [("oom", True), ("timeout", True), ("not run", True), ("error", False)]
)
def test_what_is_a_row_of_the_tables_does_not_run_again(
    folders: list[Path], status: str, is_row: bool
) -> None:
    for folder in folders:
        write_whole(folder / "outcome.json", Outcome.model_validate({"status": status, "steps": 0}).to_json())
    go(folders)
    assert started(folders) == ([] if is_row else [0, 1, 2])


def test_a_run_whose_limit_outlasts_the_job_is_left(
    folders: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A minute to start, and its time limit; what has ended needs no time. The clock stands still."""
    go(folders[:1])
    started(folders)
    monkeypatch.setattr("lowband.run.several.time", SimpleNamespace(monotonic=lambda: 1000.0))
    needed = 1000.0 + 60 + SPECS[1].time_limit_s
    assert go(folders, needed - 1) == ["2 of 3 runs left: the job's time is over"]
    assert started(folders) == []
    assert (folders[0] / "trained").exists()
    assert go(folders, needed) == []
    assert started(folders) == [1, 2]


@pytest.mark.parametrize(
    ("environment", "ends"),
    [
        ({}, math.inf),
        ({"SLURM_JOB_ID": "7"}, 1000.0 + 300),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "5200"}, 1000.0 + 200),  # the job began 100 s before
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": "Unknown"}, 1000.0 + 300),
    ],
)
def test_the_job_ends_when_slurm_says_so(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], ends: float
) -> None:
    """Of five minutes. Both clocks stand still."""
    clocks = SimpleNamespace(monotonic=lambda: 1000.0, time=lambda: 5000.0)
    monkeypatch.setattr("lowband.run.several.time", clocks)
    assert end_of_job(5, environment) == ends


def test_sigterm_is_passed_on_to_the_run(folders: list[Path]) -> None:
    (folders[0] / "hangs").touch()
    logs = folders[0].parents[1] / "logs"
    launch = str(folders[0].parents[1] / "launch")
    command = [sys.executable, "-m", "lowband.run.several", "5", str(logs), launch, "--", *map(str, folders)]
    process = subprocess.Popen(command)
    while not (folders[0] / "runs").exists():
        assert process.poll() is None
        time.sleep(0.05)
    process.terminate()
    assert process.wait() == 128 + 15
    assert (folders[0] / "was-told").exists()
    assert started(folders) == [0]


def test_a_run_has_ended_if_what_was_trained_is_what_the_spec_asks_for(folders: list[Path]) -> None:
    spec, folder = SPECS[0], RunFolder(folders[0], SPECS[0].training_sum)
    folder.write_outcome(Outcome(status="ok", steps=3))
    longer = spec.model_copy(update={"time_limit_s": spec.time_limit_s + 1, "checkpoint_every": 7})
    device = spec.machine.device.model_copy(update={"source": "another sentence"})
    machine = spec.machine.model_copy(update={"device": device})
    scheme = spec.scheme.model_copy(update={"known_as": "by another name"})
    model = spec.model.model_copy(update={"source": "another sentence"})
    said = spec.model_copy(update={"machine": machine, "scheme": scheme, "model": model})
    other = spec.model_copy(update={"micro_batch": spec.micro_batch + 1})
    for written in (longer, said, spec):
        write_whole(folder.spec, written.to_json())  # later than the outcome
        assert has_ended(folder)
    assert not has_ended(folder, other) and not has_ended(folder, spec.model_copy(update={"seed": 77}))
    for sum_of_text, is_of_it in (("another", False), (read_corpus(spec.text).facts["sha256"], True)):
        data = {"sha256": sum_of_text}
        folder.write_environment(
            Environment(commit="", dirty=False, hosts=(), device="", versions={}, variables={}, data=data)
        )
        assert has_ended(folder) == is_of_it
    folder.outcome.unlink()
    folder.write_outcome(Outcome(status="timeout", steps=3))
    assert has_ended(folder)
    os.utime(folder.outcome, ns=(0, 0))
    assert not has_ended(folder)  # it may have more time now
    os.utime(folder.outcome)
    assert has_ended(folder, spec) and not has_ended(folder, longer)  # which rule `spec` has yet to write
