"""A command that a test starts, run to its end."""

import os
import subprocess
from pathlib import Path

from tests.checkout import ROOT


def called(
    *command: str | Path, cwd: Path = ROOT, tree: Path = ROOT, timeout: float | None = 600, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Its exit code, and what it says.

    tree:      whose package Python finds
    variables: of its environment, beside this process's
    """
    env = {**os.environ, "PYTHONPATH": str(tree / "src"), **variables}
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=timeout)
