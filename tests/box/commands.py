"""`lowband` as a user runs it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def lowband(*arguments: str, timeout: float = 100, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """`python -m lowband ...`, from the root of a tree."""
    env = {**os.environ, "PYTHONPATH": str(cwd / "src")}
    command = [sys.executable, "-m", "lowband", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, cwd=cwd, env=env)
