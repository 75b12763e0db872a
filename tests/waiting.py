"""The one place that knows when a wait has become a hang."""

import time
from collections.abc import Callable

HANG_S = 300.0  # far beyond what a busy machine needs


def wait_for(condition: Callable[[], object], seconds: float = HANG_S) -> None:
    """Return once the condition holds; fail after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain"
        time.sleep(0.02)
