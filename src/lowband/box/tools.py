"""Programs of the system that make a box, and what they say when they fail."""

import subprocess
from collections.abc import Sequence

from lowband.errors import UserError

TIMEOUT_S = 60.0


def run(command: Sequence[str], text: str = "") -> str:
    """What the command prints, given `text` to read. Raises UserError with its last words."""
    where = " ".join(command[-5:])
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"no end after {TIMEOUT_S:.0f} s", where=where) from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise UserError(lines[-1] if lines else f"exit code {done.returncode}", where=where)
    return done.stdout
