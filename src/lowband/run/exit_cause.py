"""Record why a rank that a launcher started is ending: time limit, order to end, or failure of another rank.

No parent process of ours watches such a rank, and it may wait for its peers inside torch, where Python signal
handlers do not run. So a thread in the rank does.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread

from lowband.run.orders import orders, read_order

LOOK_S = 2.0  # interval between checks for another rank's failure


@contextmanager
def exit_on_order(
    limit_s: float, end: Callable[[signal.Signals | None], int], look: Callable[[], int | None]
) -> Iterator[None]:
    """A context that ends the process on SIGTERM or SIGINT, after `limit_s`, or on another rank's failure.

    end:  called with the signal, or with None when the time is up; returns the process's exit code
    look: called every `LOOK_S`; returns an exit code if the process must end, otherwise None
    Both are called in another thread. Only the main thread can enter the context.
    """
    done, is_done = os.pipe()
    with orders() as ordered:
        deadline = time.monotonic() + limit_s
        thread = Thread(target=_wait, args=(ordered, done, deadline, end, look), daemon=True)
        thread.start()
        try:
            yield
        finally:
            os.close(is_done)
            thread.join()
            os.close(done)


def _wait(
    ordered: int,
    done: int,
    deadline: float,
    end: Callable[[signal.Signals | None], int],
    look: Callable[[], int | None],
) -> None:
    while True:
        left_s = deadline - time.monotonic()
        ready, _, _ = select.select([ordered, done], [], [], max(0.0, min(LOOK_S, left_s)))
        if done in ready:
            return
        code = None
        if ordered in ready:
            order = read_order(ordered)
            code = end(order) if order is not None else None
        elif left_s <= 0:
            code = end(None)
        else:
            code = look()
        if code is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
