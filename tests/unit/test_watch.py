"""A command of the workflow under a bar."""

import subprocess
import sys
from pathlib import Path

import pytest

from lowband.__main__ import main
from lowband.run.status import RunStatus, Status
from lowband.run.watch import bar
from tests.waiting import HANG_S

PRINTS = "import sys; print('1 of 4 steps (25%) done'); print('why it failed'); sys.exit(int(sys.argv[1]))"
OK = RunStatus("a", "s", "ok", share=1.0, wall_s=30)


@pytest.mark.parametrize(
    ("printed", "runs", "line"),
    [
        (b"Building DAG of jobs...", None, "[........................]   0% | planning; left: unknown yet"),
        (b"1 of 4 steps (25%) done", None, "[######..................]  25% | 1 of 4 steps; left: 30 s"),
        # With runs left it is what they take, each as long as those that ended.
        (
            b"3 of 4 steps (75%) done",
            [OK, RunStatus("b", "s", "running", share=0.5)],
            "1 of 2 runs; left: 15 s",
        ),
        (
            b"3 of 4 steps (75%) done",
            [OK, RunStatus("b", "other", "waiting")],
            "1 of 2 runs; left: unknown yet",
        ),
        (b"3 of 4 steps (75%) done", [OK, RunStatus("b", "s", "oom")], "2 of 2 runs, 1 failed; left: 3 s"),
        (b"x\n1 of 2 steps (50%) done\n2 of 2 steps (100%) done", None, "100% | 2 of 2 steps"),
    ],
)
def test_the_bar(printed: bytes, runs: list[RunStatus] | None, line: str) -> None:
    assert bar(printed, None if runs is None else Status(runs), 10).endswith(line)


@pytest.mark.parametrize("code", [0, 3])
def test_what_it_prints_goes_to_a_file(code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", PRINTS, str(code)]
    assert main(["watch", "--results", "mine", "--root", str(tmp_path), "--", *command]) == code
    log = tmp_path / "logs" / "mine" / "snakemake.log"
    assert log.read_text().splitlines() == ["1 of 4 steps (25%) done", "why it failed"]
    shown = capsys.readouterr().out
    assert "25% | 1 of 4 steps" in shown
    assert ("why it failed" in shown) == ("failed with exit code 3" in shown) == (code == 3)


@pytest.mark.parametrize(
    ("code", "told"), [("os.kill(os.getpid(), 9)", 137), ("os.kill(os.getppid(), 15)", 7)]
)
def test_a_signal(code: str, told: int, tmp_path: Path) -> None:
    """One that ends the command gives a shell's code; SIGTERM to the bar goes to the command, which ends."""
    ends = "import os, signal, sys, time\nsignal.signal(15, lambda *_: sys.exit(7))\n"
    command = [sys.executable, "-c", f"{ends}{code}\nwhile True: time.sleep(0.05)"]
    words = ["watch", "--results", "mine", "--root", str(tmp_path), "--", *command]
    ended = subprocess.run(
        [sys.executable, "-m", "lowband", *words], capture_output=True, text=True, timeout=HANG_S
    )
    assert ended.returncode == told, ended.stdout + ended.stderr
    assert f"failed with exit code {told}" in ended.stdout


@pytest.mark.parametrize("command", [[], ["--"], ["--", "no-such-program"]])
def test_a_command_that_cannot_be_started(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["watch", "--results", "mine", "--root", str(tmp_path), *command]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
