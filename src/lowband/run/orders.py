"""Orders to end, SIGTERM and SIGINT, as bytes in a pipe instead of exceptions.

An exception raised by a handler may appear anywhere, even where Python drops it, as in a hook of `fork`. A
byte is read where it is expected. The C part of Python's signal handling writes it, even while the main
thread waits inside a library.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

ORDERS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def orders() -> Iterator[int]:
    """A context in which an order only writes its number into a pipe; yields the pipe's reading end.

    A signal that was ignored stays ignored. Only the main thread can enter the context.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = {
        order: signal.signal(order, lambda *_: None)
        for order in ORDERS
        if signal.getsignal(order) is not signal.SIG_IGN
    }
    wakeup = signal.set_wakeup_fd(writer)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(wakeup)
        for order, handler in before.items():
            signal.signal(order, handler)
        os.close(reader)
        os.close(writer)


def read_order(reader: int) -> signal.Signals | None:
    """The next order in the pipe, which must not be empty; None if it is another signal's number."""
    number = os.read(reader, 1)[0]
    return signal.Signals(number) if number in ORDERS else None
