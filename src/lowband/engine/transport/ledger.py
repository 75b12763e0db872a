"""Bytes sent, counted in the code that calls the collective."""

import threading
from collections import Counter

from lowband.spec.records import Sent, SentRow, of_rows


class Ledger:
    """Bytes that this rank has sent since the last `take`.

    not_counted: axes along which others send, too, unseen
    """

    def __init__(self) -> None:
        self.not_counted: set[str] = set()
        self._bytes: Counter[SentRow] = Counter()
        self._lock = threading.Lock()  # several lanes count

    def add(self, level: str, collective: str, wire: str, sent_bytes: int) -> None:
        """Count bytes that left this rank over links of `level`."""
        with self._lock:
            self._bytes[level, collective, wire] += sent_bytes

    def read(self) -> list[Sent]:
        """The counts so far."""
        with self._lock:
            return self._counts()

    def take(self) -> list[Sent]:
        """Return the counts so far and reset them to zero."""
        with self._lock:
            taken = self._counts()
            self._bytes.clear()
        return taken

    def _counts(self) -> list[Sent]:
        return list(of_rows(dict(sorted(self._bytes.items()))))
