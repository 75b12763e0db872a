"""Runs the system programs that make a box, and reports their errors."""

import subprocess
from collections.abc import Sequence

from lowband.errors import UserError

TIMEOUT_S = 60.0


def run(command: Sequence[str], text: str = "") -> str:
    """The output of a command with `text` as its input. Raises UserError with its last line of errors."""
    where = " ".join(command[-5:])
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"did not end within {TIMEOUT_S:.0f} s", where=where) from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise UserError(lines[-1] if lines else f"exit code {done.returncode}", where=where)
    return done.stdout
