"""A run from the outside: records, launchers, and every way to end badly."""

import json
import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import torch.distributed as dist
from started import MODEL, SMOKE, begun, both_ended, ended, killed, launched, spec_file

from lowband.engine.checkpoint import checkpointer
from lowband.engine.checkpoint.rank_file import write_rank_file
from lowband.errors import UserError
from lowband.run import exit_cause
from lowband.run import training_loop as loop
from lowband.run.ending import exit_code
from lowband.run.environment import code_version
from lowband.run.joining import _device, device_type
from lowband.run.on_ranks import on_ranks
from lowband.run.ranks import Rank
from lowband.run.train import train
from lowband.spec.records import Outcome
from lowband.spec.run import RunSpec
from lowband.spec.run_folder import RunFolder
from tests import warm
from tests.checkout import CONFIG
from tests.printed import printed_by
from tests.refused import answer
from tests.waiting import wait_for


def command(path: Path) -> list[str]:
    return [sys.executable, "-m", "lowband", "train", str(path)]


def run(arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **variables}
    return subprocess.run(arguments, capture_output=True, text=True, timeout=300, env=env)


@pytest.mark.parametrize(
    ("suite", "devices", "is_launched", "expected"),
    [
        ("smoke", 8, False, "cpu"),  # a machine of CPU cores
        ("links", 64, False, "cpu"),  # a box: its links are sockets
        ("cuda", 8, False, "cuda"),
        ("cuda", 4, False, "cpu"),  # 8 ranks: NCCL takes one a device
        ("cuda", 1, True, "cuda"),  # Slurm shows each task its own
    ],
)
def test_the_machine_tells_the_device(
    suite: str, devices: int, is_launched: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    spec = next(spec for spec in CONFIG.runs([suite]) if suite != "cuda" or spec.ranks == 8)
    assert device_type(spec, is_launched) == expected


def test_a_launched_rank_without_its_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UserError, match="sees no H100"):
        device_type(CONFIG.runs(["cuda"])[0], is_launched=True)


def test_a_rank_forked_too_late_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(UserError, match=r"before the ranks were forked.*amdsmi"):
        _device(Rank(0, 2, 0, "env://"), "cuda")


def test_local_ranks_write_whole_records(tmp_path: Path) -> None:
    path = spec_file(tmp_path)
    done = run(command(path))
    assert done.returncode == 0, done.stderr
    folder = RunFolder(tmp_path)
    outcome = Outcome.read_json(folder.outcome)
    assert (outcome.status, outcome.steps) == ("ok", 6)
    steps = list(folder.read_steps())
    assert [s.step for s in steps] == [1, 2, 3, 4, 5, 6]
    assert steps[-1].loss < steps[0].loss
    for s in steps:
        assert s.step_time_s == pytest.approx(s.compute_time_s + s.exposed_comm_time_s)
        assert s.tokens == 8 * 64
    env = json.loads(folder.env.read_text())
    assert len(env["data"]["sha256"]) == 64
    assert env["versions"]["torch"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "env.json",
        "outcome.json",
        "run.lock",
        "spec.json",
        "steps.jsonl",
    ]


def test_torchrun_starts_the_same_ranks(tmp_path: Path) -> None:
    for name in ("local", "torchrun"):
        (tmp_path / name).mkdir()
    local, launched = (spec_file(tmp_path / name, ranks=2, model=MODEL) for name in ("local", "torchrun"))
    assert train(local).status == "ok"
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = warm.begun([*torchrun, "-m", "lowband", "train", launched], tmp_path / "printed")
    process.join(300)
    assert warm.killed(process) == 0, (tmp_path / "printed").read_text()
    outcomes = [Outcome.read_json(path.parent / "outcome.json") for path in (local, launched)]
    assert outcomes[0].weights_sha256 == outcomes[1].weights_sha256 != ""


def test_slurm_variables_make_a_rank(tmp_path: Path) -> None:
    """As srun starts it, on one rank; the box's Slurm is a later capability."""
    path = spec_file(tmp_path, "smoke-gpt-200k-zero3-n0001-b8-s64-r1")
    variables = {"SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    assert ended(begun(path, **variables, **address), path) == (0, "")
    code, error = ended(begun(path, **{**variables, "SLURM_NTASKS": "2"}, **address), path)
    assert code == 2
    assert "srun started 2 ranks (allowed: 1, as in the spec)" in error


ENDLESS = {"ranks": 2, "steps": 100_000}


def test_git_is_run_by_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a git that fails on another is no reason to stop."""
    asked, git = tmp_path / "asked", tmp_path / "bin" / "git"
    git.parent.mkdir()
    git.write_text(f'#!/bin/sh\necho "$RANK" >> {asked}\n[ "$RANK" = 0 ] && echo abc\n')
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(git.parent), prepend=os.pathsep)
    path = spec_file(tmp_path, ranks=2)
    codes, errors = both_ended(launched(path, code_version.cache_clear), path)
    assert codes == [0, 0], errors
    assert set(asked.read_text().split()) == {"0"}
    assert json.loads((tmp_path / "env.json").read_text())["commit"] == "abc"


def time_is_up_once_begun(path: Path) -> None:
    """In a rank: its clock stands until the run has steps, and a checkpoint if it saves any."""
    folder, saves = RunFolder(path.parent), RunSpec.read_json(path).checkpoint_every > 0

    class Clock:
        def monotonic(self) -> float:
            return 1e6 if _has_steps(folder) and folder.has_checkpoint >= saves else 0.0

    exit_cause.time = Clock()


def test_launched_ranks_keep_the_time_limit(tmp_path: Path) -> None:
    """A row of the table; a failed job, if a rerun can go on from a checkpoint."""
    begun_jobs = []
    for checkpoint_every in (0, 1):
        folder = tmp_path / str(checkpoint_every)
        folder.mkdir()
        path = spec_file(folder, **ENDLESS, time_limit_s=8, checkpoint_every=checkpoint_every)
        begun_jobs.append((path, launched(path, partial(time_is_up_once_begun, path))))
    for code, (path, ranks) in enumerate(begun_jobs):
        codes, errors = both_ended(ranks, path)
        outcome = Outcome.read_json(RunFolder(path.parent).outcome)
        assert (outcome.status, outcome.cause) == (
            "timeout",
            "the run took longer than its time_limit_s of 8",
        )
        assert codes == [code, code], errors


def test_a_launched_rank_that_is_ordered_to_end_says_so(tmp_path: Path) -> None:
    path = spec_file(tmp_path, **ENDLESS)
    ranks = launched(path)
    wait_for(lambda: _has_steps(RunFolder(tmp_path)))
    ranks[1].terminate()
    codes, errors = both_ended(ranks, path)
    assert all(code not in (0, None) for code in codes), errors
    outcome = Outcome.read_json(RunFolder(tmp_path).outcome)
    assert (outcome.status, outcome.cause) == (
        "error",
        "ended by SIGTERM: cancelled, out of its job's time, or another rank's death",
    )


def _has_steps(folder: RunFolder) -> bool:
    return folder.steps.exists() and folder.steps.stat().st_size > 0


def _child_ranks(parent: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


@pytest.mark.parametrize("victim", [0, 2])
def test_a_killed_rank_ends_the_run(tmp_path: Path, victim: int) -> None:
    path = spec_file(tmp_path, steps=100_000)
    folder = RunFolder(tmp_path)
    process = begun(path)
    try:
        wait_for(lambda: _has_steps(folder))
        ranks = _child_ranks(process.pid)
        assert len(ranks) == 4
        os.kill(ranks[victim], signal.SIGKILL)
        code, error = ended(process, path)
    finally:
        killed(process)
    assert code == 1, error
    outcome = Outcome.read_json(folder.outcome)
    assert (outcome.status, outcome.cause) == ("error", f"rank {victim} was killed by SIGKILL")
    assert outcome.steps >= 1
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


@pytest.mark.parametrize("order", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_do_not_outlive_their_launcher(tmp_path: Path, order: signal.Signals) -> None:
    path = spec_file(tmp_path, steps=100_000)
    process = begun(path)
    try:
        wait_for(lambda: _has_steps(RunFolder(tmp_path)))
        ranks = _child_ranks(process.pid)
        assert len(ranks) == 4
        os.kill(process.pid, order)
        assert ended(process, path)[0] not in (0, None)
        wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))
    finally:
        killed(process)


def test_a_rank_that_raises_says_why(tmp_path: Path) -> None:
    path = spec_file(tmp_path)

    def prepare() -> None:
        backward = loop._backward

        def broken(rank: int, spec, corpus, trainer, step: int, device) -> torch.Tensor:
            if rank == 3 and step == 2:
                raise ValueError("a broken rank")
            return backward(rank, spec, corpus, trainer, step, device)

        loop._backward = broken

    code, error = ended(begun(path, prepare), path)
    assert code == 1
    outcome = Outcome.read_json(tmp_path / "outcome.json")
    assert (outcome.status, outcome.cause) == ("error", "rank 3: ValueError: a broken rank")
    assert "a broken rank" in error


def test_time_limit_is_an_outcome(tmp_path: Path) -> None:
    assert train(spec_file(tmp_path, steps=100_000, time_limit_s=1)).status == "timeout"
    outcome = Outcome.read_json(tmp_path / "outcome.json")
    assert (outcome.status, exit_code(outcome, RunFolder(tmp_path))) == ("timeout", 0)


def test_nan_is_an_outcome(tmp_path: Path) -> None:
    path = spec_file(tmp_path, learning_rate=1e30, steps=20)
    assert ended(begun(path), path)[0] == 0
    outcome = Outcome.read_json(tmp_path / "outcome.json")
    assert outcome.status == "nan"
    assert f"at step {outcome.steps + 1}" in outcome.cause


def write_when_diverged() -> None:
    """A checkpoint is written when the step behind it has found that training diverged, and not before."""
    patch, diverged = pytest.MonkeyPatch(), Event()

    class Found(loop.Diverged):
        def __init__(self, text: str) -> None:
            super().__init__(text)
            diverged.set()

    def write(*arguments: Any) -> Any:
        diverged.wait()
        return write_rank_file(*arguments)

    patch.setattr(loop, "Diverged", Found)
    patch.setattr(checkpointer, "write_rank_file", write)


def test_a_run_that_diverges_completes_the_checkpoint_before(tmp_path: Path) -> None:
    path = spec_file(tmp_path, learning_rate=1e30, steps=20, checkpoint_every=1)
    assert ended(begun(path, write_when_diverged), path)[0] == 0
    [checkpoints] = RunFolder(tmp_path).checkpoints.iterdir()
    assert [folder.name for folder in checkpoints.iterdir()] == ["step-00000001"]


def test_bad_input_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = spec_file(tmp_path, text=str(tmp_path / "none.txt"))
    assert "no text file" in printed_by(capsys, "train", str(path), code=2)
    path.write_text(path.read_text().replace('"seed"', '"sed"'))
    error = printed_by(capsys, "train", str(path), code=2)
    assert "unknown key 'sed'" in error
    assert "seed" in error.partition("allowed")[2]
    assert [p.name for p in tmp_path.iterdir()] == ["spec.json"]


def start_as(changes: dict[str, object]) -> str:
    """What rank 1 is told when it starts with a changed spec or code."""
    from lowband.run import train

    spec = SMOKE["smoke-gpt-200k-zero3-n0004-b2-s64-r1"]
    if dist.get_rank() == 1:
        spec = spec.model_copy(update={k: v for k, v in changes.items() if k == "seed"})
        if "source" in changes:
            train.source_sha256 = lambda: changes["source"]
    text = changes.get("text", "one") if dist.get_rank() == 1 else "one"
    return answer(train._check_same_start, spec, {"sha256": text})


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, ""),
        ({"seed": 9}, "spec"),
        ({"source": "abc"}, "source code"),
        ({"text": "other"}, "text"),
    ],
)
def test_ranks_that_differ_are_told_at_start(changes: dict[str, object], what: str) -> None:
    for said in on_ranks(2, start_as, changes):
        assert (
            (f"rank 1 on {socket.gethostname()} differs from rank 0 in {what}" in said) if what else not said
        )
