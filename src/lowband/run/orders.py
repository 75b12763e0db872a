"""Orders to end, SIGTERM and SIGINT, as bytes in a pipe and not as exceptions.

An exception that a handler raises may appear anywhere, also where Python drops it, as in a hook of `fork`. A
byte is read where it is expected. Python's C half of signal handling writes it, even while the main thread
waits inside of a library.
"""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

ORDERS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def orders() -> Iterator[int]:
    """While this is entered, an order only writes its number into a pipe, whose reading end is yielded.

    A signal that was ignored stays so. Only a main thread can enter.
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
    """The order in the pipe, which must not be empty; None if another signal's number is there."""
    number = os.read(reader, 1)[0]
    return signal.Signals(number) if number in ORDERS else None
