"""The campaign on a busy machine tries what it says."""

import signal
import subprocess
import sys
from pathlib import Path

from tests.checkout import ROOT
from tests.junit import COMMAND
from tests.shaky.__main__ import ONE_PROCESS, tried
from tests.shaky.groups import FORMERLY_FRAGILE


def test_groups_name_tests() -> None:
    for paths in FORMERLY_FRAGILE.values():
        assert all((ROOT / path).exists() for path in paths)
    command = [
        *COMMAND,
        "--collect-only",
        *ONE_PROCESS,
        *(path for paths in FORMERLY_FRAGILE.values() for path in paths),
    ]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr
    for group, paths in FORMERLY_FRAGILE.items():
        assert any(line.startswith(tuple(paths)) for line in found.stdout.splitlines()), group


def test_a_failure_is_counted(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_a(): pass\ndef test_b(): assert not 1\n")
    row = tried([str(tmp_path / "test_it.py")])
    assert (row["tests"], row["failed"], row["which"]) == (2, 1, "test_b")


def test_loops_end_with_a_campaign_that_is_killed() -> None:
    """They have its output open: it ends when they have."""
    killed = "import os, signal\nfrom tests.shaky.__main__ import busy\n"
    killed += "with busy(2): print('begun', flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-c", killed], cwd=ROOT, capture_output=True, timeout=600)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, b"begun\n")
