"""A sample of the campaign, and that it reads outputs rightly. The whole one: `python -m tests.anchors`."""

import sys

import pytest

from lowband.spec.model import ModelSpec
from tests.anchors import checkpoints, systems
from tests.anchors.__main__ import cases
from tests.anchors.told import Told
from tests.anchors.trial import trial, undisturbed
from tests.checkout import CONFIG
from tests.warm import Forked

TORCHRUN = """
[rank0]: RuntimeError: [pair.cc:537] Read error [127.0.0.1]:52452: Connection reset by peer.
E1123 failed (exitcode: -9) local_rank: 3 (pid: 9753) of binary: VENV/bin/python3
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 9750)  (SIGTERM)
Root Cause (first observed failure):
[0]:
  rank      : 3 (local_rank: 3)
  exitcode  : -9 (pid: 9753)  (SIGKILL)
"""
DEEPSPEED = "[launch.py:253] Killing subprocess 19856\n[launch.py:259] [...] exits with return code = -9\n"
FROZEN = "lowband: rank 3 is stopped (SIGSTOP); rank 0: RuntimeError: Timed out waiting 8000ms for recv\n"


def test_what_outputs_say() -> None:
    assert Told.by(TORCHRUN, "kill rank") == Told(9, (3,), says_cause=True, says_symptom=True)
    assert Told.by(DEEPSPEED, "kill rank") == Told(2, (), says_cause=True, says_symptom=False)
    assert Told.by(FROZEN, "freeze rank") == Told(1, (3,), says_cause=True, says_symptom=True)
    assert Told.by(FROZEN, "cut link").ranks_named == (0,)  # the one that waited
    assert Told.by(TORCHRUN.replace("-9", "-6").replace("KILL", "ABRT"), "kill rank").ranks_named == ()


def test_each_system_has_each_fault_on_4_ranks() -> None:
    assert len(list(cases(1, is_root=True))) == 4 * 2 + 3 + 3 * 2
    assert not [case for case in cases(1, is_root=False) if case[1] == "cut link"]


@pytest.mark.parametrize(
    ("code", "ended"), [("raise SystemExit(3)", 3), ("1 / 0", 1), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_a_forked_python_ends_as_any_other(tmp_path, code: str, ended: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"import sys, os\nprint(sys.argv[1], os.environ['A'], flush=True)\n{code}\n")
    output = tmp_path / "output"
    with output.open("wb") as file:
        process = Forked(
            [sys.executable, "-u", str(script), "x"], stdout=file, stderr=file, env={"A": "y"}, cwd=tmp_path
        )
    assert process.wait(60) == ended
    assert output.read_text().startswith("x y\n")
    assert ("ZeroDivisionError" in output.read_text()) == (ended == 1)


@pytest.mark.wide
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_killed_rank_is_told_and_costs_the_steps_since_the_checkpoint(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a long run: a busy machine looks late at how far it is, and checkpoints come behind training."""
    monkeypatch.setattr(systems, "STEPS", 80)
    undisturbed.cache_clear()
    row, _ = trial("lowband", "kill rank", ranks, 1)
    undisturbed.cache_clear()
    assert (row.exit_code, row.told, row.same_end) == ("1", True, True)
    assert row.resumed_from in range(0, row.last_step, 10)
    assert row.lost_steps == row.last_step - row.resumed_from


@pytest.mark.parametrize(
    "method",
    [pytest.param(m, marks=[pytest.mark.wide] * m.startswith("DCP")) for m in checkpoints.METHODS],
)
def test_every_method_writes_the_whole_state(method: str) -> None:
    small = CONFIG.model("gpt-200k").model_dump()
    spec = ModelSpec.model_validate(small | {"layers": 1, "hidden": 32, "seq_len": checkpoints.TOKENS})
    found = checkpoints.rows(method, spec, 1)
    assert [row.checkpoint for row in found] == [1, 2]
    for row in found:
        assert row.stall_s > 0
        assert row.stall_s <= row.durable_s or row.steps  # a stager's wait may come after the disk
        assert row.state_bytes * row.ranks >= 12 * spec.parameters
        assert method == "copy" or row.written_bytes >= 12 * spec.parameters
