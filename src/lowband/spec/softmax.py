"""What `lowband bench-softmax` writes: its two raw tables' rows, base units (seconds, bytes)."""

from typing import NamedTuple

TORCH = "torch.softmax"  # the line from outside; it has no instruction set of our choice
ANY_ISA = "its own"


class Time(NamedTuple):
    """A row of softmax_times.csv: one call. The calls of one `repeat` of a size came one after the other."""

    isa: str
    algorithm: str
    elements: int
    repeat: int
    time_s: float


class Setup(NamedTuple):
    """A row of softmax_setup.csv: with what an instruction set was measured, or why it was not.

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
