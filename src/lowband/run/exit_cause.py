"""Record why a rank that a launcher started is ending: time limit, order to end, failure of another rank.

Nobody here watches such a rank from outside, and it may wait for its peers inside of torch, where no handler
of Python runs. So a thread waits beside it.
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

LOOK_S = 2.0  # between two looks for another rank's failure


@contextmanager
def last_words(
    limit_s: float, end: Callable[[signal.Signals | None], int], look: Callable[[], int | None]
) -> Iterator[None]:
    """While this is entered, an order to end and the end of `limit_s` end the process with the code of `end`.

    end:  given the order, or None when the time is over
    look: called every `LOOK_S`; an exit code that it returns ends the process, too
    Both are called in a thread. Only a main thread can enter.
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
