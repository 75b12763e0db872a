"""A row of kernels.csv, written by `lowband bench-kernel`, base units. Needs only the standard library."""

import dataclasses

STAMP = ("device", "torch", "triton", "commit", "measurement_version")  # of its environment, on every row


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelRow:
    """One implementation of one operation on one size. Fields that do not apply are empty.

    outcome: ok | wrong (error over the tolerance: not timed) | unsupported | oom | error | not run
    time_s:  median over `runs`; time_20_s and time_80_s the 20 % and 80 % quantiles
    clock_mhz: of a GPU's multiprocessors, right after the last run
    inner:   of a matrix product, the dimension summed over
    bytes:   moved between device memory and chip by this algorithm, by its formula; least_bytes: the least
             that any algorithm moves
    """

    part: str
    operation: str
    implementation: str
    dtype: str
    model: str = ""
    batch: int | None = None
    heads: int | None = None
    seq_len: int | None = None
    head_dim: int | None = None
    causal: bool | None = None
    rows: int | None = None
    columns: int | None = None
    inner: int | None = None
    partners: int | None = None
    outcome: str = "ok"
    reason: str = ""
    runs: int | None = None
    time_s: float | None = None
    time_20_s: float | None = None
    time_80_s: float | None = None
    clock_mhz: float | None = None
    flops: int | None = None
    paper_flops: int | None = None
    bytes: int | None = None
    least_bytes: int | None = None
    error: float | None = None
    tolerance: float | None = None


TEXT = (*(field.name for field in dataclasses.fields(KernelRow) if field.type is str), *STAMP[:-1])
