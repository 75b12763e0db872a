"""Memory of this process in pages of 2 MiB, so that a fork of it copies few.

Tests fork some ten thousand ranks from a process that has imported all. Of pages of 4 KiB, to copy a fork's
table and to drop it again is most of what such a rank takes of the processor, and half of a small test.
"""

import ctypes
from collections.abc import Iterator
from pathlib import Path

MADV_COLLAPSE = 25  # Linux 6.1; an older kernel refuses it, and all stays as it is
PAGE_BYTES = 2**21


def collapse() -> None:
    """Copy what this process has written so far into such pages. What cannot be stays as it is."""
    maps = Path("/proc/self/maps")
    if not maps.exists():  # not Linux
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for start in starts(maps.read_text()):
        madvise(start, PAGE_BYTES, MADV_COLLAPSE)


def starts(maps: str) -> Iterator[int]:
    """Addresses of whole pages of memory that is written and of no file (proc_pid_maps(5))."""
    for line in maps.splitlines():
        addresses, access, _, _, _, *name = line.split(maxsplit=5)
        if access == "rw-p" and (not name or name[0] == "[heap]"):
            first, last = (int(address, 16) for address in addresses.split("-"))
            yield from range(-(-first // PAGE_BYTES) * PAGE_BYTES, last - PAGE_BYTES + 1, PAGE_BYTES)
