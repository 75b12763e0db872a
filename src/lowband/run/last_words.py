"""A word before the end, of a rank that a launcher started: out of time, or ordered to end.

Nobody here watches such a rank from outside, and it may wait for its peers inside of torch, where no handler
of Python runs. So a thread waits beside it, woken by the C half of Python's signal handling.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Thread

_DONE = b"\0"  # no signal has this number


@contextmanager
def last_words(limit_s: float, say: Callable[[bool], int]) -> Iterator[None]:
    """While this is entered, SIGTERM and the end of `limit_s` end the process with the exit code of `say`.

    say: told whether the time is over; called in a thread. Only a main thread can enter.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    handler = signal.signal(signal.SIGTERM, lambda *_: None)
    wakeup = signal.set_wakeup_fd(writer)
    thread = Thread(target=_wait, args=(reader, time.monotonic() + limit_s, say), daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.write(writer, _DONE)
        thread.join()
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, handler)
        os.close(reader)
        os.close(writer)


def _wait(reader: int, deadline: float, say: Callable[[bool], int]) -> None:
    while True:
        ready, _, _ = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))
        told = os.read(reader, 1) if ready else b""
        if told == _DONE:
            return
        if not ready or told[0] == signal.SIGTERM:
            code = say(not ready)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
