"""Programs of the system that make a box, and what they say when they fail."""

import subprocess
from collections.abc import Sequence

from lowband.errors import UserError

TIMEOUT_S = 60.0


def run(command: Sequence[str], text: str = "") -> str:
    """What the command prints, given `text` to read. Raises UserError with its last words."""
    what = " ".join(command[-5:])
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{what}: no end after {TIMEOUT_S:.0f} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines()
        raise UserError(f"{what}: {lines[-1] if lines else f'exit code {done.returncode}'}")
    return done.stdout
