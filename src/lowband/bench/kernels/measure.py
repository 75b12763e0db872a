"""A group of cases: each is built, checked, and if correct timed, alternating with the group's others.

A failing case does not end the benchmark: its row records the failure as its outcome.
"""

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lowband.bench.kernels.rows import clocks_of
from lowband.errors import UserError
from lowband.spec.kernel_rows import KernelRow

TARGET_S = 0.1  # time spent on one case, without warm-up
RUNS = {"cuda": (5, 50), "cpu": (5, 5)}  # minimum and maximum number of timed runs
WARMUP = 3
# Larger than any L2 cache, so that no kernel finds its input there. It is read: had it been written, the
# cache would still be writing it back while the kernel runs.
FLUSH_BYTES = 2**30
BUSY_CYCLES = 1_000_000  # half a millisecond, in which the host launches all timed work


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """make: builds the inputs and returns the function to time; error_of: the error of its result."""

    row: KernelRow
    make: Callable[[], Callable[[], Any]]
    error_of: Callable[[Any], float]
    tolerance: float


def measure(
    group: list[KernelCase], device: torch.device, is_in_time: Callable[[], bool]
) -> Iterator[KernelRow]:
    """Check and time the cases of a group; yields a row per case, in order."""
    obstacle = forget(device) if is_in_time() else "out of time"
    if obstacle:
        for case in group:
            yield dataclasses.replace(case.row, outcome="not run", reason=obstacle)
        return
    rows: dict[int, KernelRow] = {}
    works: dict[int, Callable[[], Any]] = {}
    for i, case in enumerate(group):
        with _Guard() as guard:
            work = case.make()
            error = case.error_of(work())
            for _ in range(WARMUP):
                work()
            wait(device)
            row = dataclasses.replace(case.row, error=error, tolerance=case.tolerance)
            if error <= case.tolerance:  # false for a NaN
                works[i] = work
            else:
                row = dataclasses.replace(row, outcome="wrong", reason="error over the tolerance")
            rows[i] = row
        if guard.outcome:
            rows[i] = dataclasses.replace(case.row, outcome=guard.outcome, reason=guard.reason)
    times: dict[int, list[float]] = {}
    clock = None
    with _Guard() as guard:
        times = _times(works, device)
        clock = _clock_mhz(device)
    for i in works:
        if guard.outcome:
            rows[i] = dataclasses.replace(rows[i], outcome=guard.outcome, reason=guard.reason)
    for i in range(len(group)):
        yield dataclasses.replace(_timed(rows[i], times[i]), clock_mhz=clock) if i in times else rows[i]


def forget(device: torch.device) -> str:
    """Free earlier groups' memory (models are reference cycles). Returns an error of the device, or ''."""
    gc.collect()
    if device.type == "cuda":
        try:
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
        except RuntimeError as error:  # from a faulty kernel: CUDA then accepts no more work
            return f"the device failed in a group before: {error}".splitlines()[0]
    return ""


def _clock_mhz(device: torch.device) -> float | None:
    found = clocks_of(device) if device.type == "cuda" else None
    return float(found["clocks.sm"].removesuffix(" MHz")) if found else None


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _timed(row: KernelRow, seconds: list[float]) -> KernelRow:
    quantiles = statistics.quantiles(seconds, n=5)
    return dataclasses.replace(
        row, runs=len(seconds), time_s=statistics.median(seconds), time_20_s=quantiles[0],
        time_80_s=quantiles[3],
    )  # fmt: skip


def _times(works: dict[int, Callable[[], Any]], device: torch.device) -> dict[int, list[float]]:
    """Seconds of each run. Each round runs every case once, so that drift over time affects all equally."""
    once = {i: _seconds(work, device, None) for i, work in works.items()}
    flush = torch.zeros(FLUSH_BYTES // 4, device=device) if device.type == "cuda" else None
    least, most = RUNS[device.type]
    counts = {i: max(least, min(most, int(TARGET_S / max(s, 1e-9)))) for i, s in once.items()}
    times: dict[int, list[float]] = {i: [] for i in works}
    for turn in range(max(counts.values(), default=0)):
        for i, work in works.items():
            if turn < counts[i]:
                times[i].append(_seconds(work, device, flush))
    return times


def _seconds(work: Callable[[], Any], device: torch.device, flush: torch.Tensor | None) -> float:
    if device.type != "cuda":
        start = time.perf_counter()
        work()
        return time.perf_counter() - start
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    if flush is not None:
        flush.sum()
    torch.cuda._sleep(BUSY_CYCLES)
    before.record()
    work()
    after.record()
    after.synchronize()
    return before.elapsed_time(after) / 1e3


class _Guard:
    """Turns an exception into an outcome and a one-line reason."""

    outcome = reason = ""

    def __enter__(self) -> "_Guard":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None:
            return False
        if not isinstance(error, Exception):
            return False
        self.outcome = _outcome(error)
        lines = str(error).strip().splitlines()
        self.reason = f"{type(error).__name__}: {lines[0] if lines else ''}"[:300]
        return True


def _outcome(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return "oom"
    has_no_kernel = any(text in str(error) for text in ("No available kernel", "No viable backend"))
    if has_no_kernel or isinstance(error, UserError | NotImplementedError | ImportError):
        return "unsupported"
    return "error"
