"""Rows of the two raw tables that `lowband bench-softmax` writes, in base units (seconds, bytes)."""

from typing import NamedTuple

TORCH = "torch.softmax"  # the external baseline; we do not choose its instruction set
ANY_ISA = "its own"


class Time(NamedTuple):
    """A row of softmax_times.csv: one call. Calls with the same size and `repeat` were made in succession."""

    isa: str
    algorithm: str
    elements: int
    repeat: int
    time_s: float


class Setup(NamedTuple):
    """A row of softmax_setup.csv: an instruction set's compiler and caches, or why it was not measured.

    l1_bytes, l2_bytes, last_bytes: data caches as the first core sees them; `last` is the outermost level
    """

    isa: str
    status: str
    cause: str
    device: str
    l1_bytes: int
    l2_bytes: int
    last_bytes: int
    compiler: str
    flags: str
    torch: str
    commit: str
    dirty: bool
