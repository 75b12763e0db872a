"""Softmax of one vector on one core, measured as the released code of arXiv 2001.04438 does.

Inputs are uniform in [-1000, 1000]. Before each call the input is read once, so the caches hold as much of it
as fits; outputs cycle through more memory than the caches hold. The algorithms, the passes that only move
data, and torch.softmax are called in turn, in a new random order each time, so that other activity on the
machine affects all equally. An instruction set is not reported if any of its algorithms fails a check
against float64.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from lowband.cost.softmax import ALGORITHMS, FP32_BYTES, PASSES, READ
from lowband.errors import UserError
from lowband.kernels.c_library import compiler
from lowband.kernels.softmax_cpu import ISAS, Kernels, error_bound, kernels, reference
from lowband.run.environment import cpu_name, describe, host
from lowband.spec.benchmarks import Measured
from lowband.spec.softmax import ANY_ISA, TORCH, Setup, Time

SMALLEST_BYTES, LARGEST_BYTES = 4 * 2**10, 2**30
OUT_OF_CACHE = 8  # the sweep ends at this multiple of the last cache
FEWEST, MOST = 21, 101  # calls of each algorithm or pass at one size
BUDGET_S = 0.7  # per size, as far as FEWEST allows
_ALIGNMENT_BYTES = 4096
_SEED = 2001_04438

Vector = NDArray[np.float32]
Call = Callable[[Vector, Vector], float]  # x, y -> seconds


class Caches(NamedTuple):
    """Data caches of the first core, bytes."""

    l1: int
    l2: int
    last: int


def bench() -> Measured:
    times, setups, environment = measure()
    lines = [f"{row.isa}: {row.status} {row.cause}".rstrip() for row in setups]
    return Measured({"softmax_times": times, "softmax_setup": setups}, environment, lines)


def measure(sizes: Sequence[int] | None = None) -> tuple[list[Time], list[Setup], dict[str, Any]]:
    """Measure; returns rows of calls, rows of instruction sets, and the environment.

    An unavailable instruction set is a row with its cause.

    sizes: elements; default: powers of two from 4 KiB to OUT_OF_CACHE times the last cache
    """
    built: dict[str, Kernels] = {}
    causes: dict[str, str] = {}
    caches = Caches(0, 0, 0)
    for isa in ISAS:
        try:
            caches = read_caches()
            built[isa] = _checked(kernels(isa))
        except UserError as error:
            causes[isa] = str(error)
    torch.set_num_threads(1)
    times = list(_times(built, sizes or default_sizes(caches), caches)) if built else []
    setups = [_setup(isa, causes.get(isa, ""), caches) for isa in ISAS]
    environment = describe((host(),), torch.device("cpu"), "none", {}, "none").model_dump(mode="json")
    more = {"caches_bytes": caches._asdict(), "load_average": os.getloadavg(), "niceness": os.nice(0)}
    return (
        times,
        setups,
        environment | more | {"compiler": _compiler(), "isas": [row._asdict() for row in setups]},
    )


def default_sizes(caches: Caches) -> list[int]:
    """Elements: from SMALLEST_BYTES, doubling, to OUT_OF_CACHE times the last cache."""
    sizes = [SMALLEST_BYTES]
    while sizes[-1] < min(OUT_OF_CACHE * caches.last, LARGEST_BYTES):
        sizes.append(2 * sizes[-1])
    return [size // FP32_BYTES for size in sizes]


def read_caches() -> Caches:
    """The first core's cache sizes, as Linux reports them. Raises UserError if it reports none."""
    folder = Path("/sys/devices/system/cpu/cpu0/cache")
    found: dict[int, int] = {}
    for index in folder.glob("index*"):
        level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        if kind != "Instruction":
            found[int(level)] = int(size.removesuffix("K")) * 2**10
    if not {1, 2} <= set(found):
        raise UserError("reports no cache sizes", where=folder)
    return Caches(found[1], found[2], found[max(found)])


def _times(built: dict[str, Kernels], sizes: Sequence[int], caches: Caches) -> Iterator[Time]:
    random = np.random.default_rng(_SEED)
    pool = _aligned(max(*sizes, 2 * caches.last // FP32_BYTES))
    pool.fill(0)  # maps its pages before the first call
    for n in sizes:
        x = _aligned(n)
        x[:] = random.uniform(-1000, 1000, n)
        outputs = _Outputs(pool, n)
        calls = _calls(built)
        start = time.perf_counter()
        for call in calls.values():
            call(x, outputs.next())  # not counted: warms up pages, tables and the CPU clock
        repeats = int(BUDGET_S / (time.perf_counter() - start))
        for repeat in range(max(FEWEST, min(MOST, repeats))):
            for i in random.permutation(len(calls)):
                isa, name = list(calls)[i]
                yield Time(isa, name, n, repeat, calls[isa, name](x, outputs.next()))


def _calls(built: dict[str, Kernels]) -> dict[tuple[str, str], Call]:
    """(isa, name) -> the function to time."""

    def timed(of: Kernels, name: str) -> Call:
        return lambda x, y: of.seconds(name, x, y)

    calls = {(isa, name): timed(of, name) for isa, of in built.items() for name in (*ALGORITHMS, *PASSES)}
    reader = next(iter(built.values()))
    return calls | {(ANY_ISA, TORCH): lambda x, y: _torch_seconds(reader, x, y)}


def _torch_seconds(reader: Kernels, x: Vector, y: Vector) -> float:
    """Seconds of torch.softmax, timed as in `Kernels.seconds`, plus torch's call overhead (microseconds)."""
    source, target = torch.from_numpy(x), torch.from_numpy(y)
    reader.run(READ, x, y)
    start = time.perf_counter()
    torch.softmax(source, 0, out=target)
    return time.perf_counter() - start


class _Outputs:
    """Consecutive vectors of n values in `pool`, used cyclically."""

    def __init__(self, pool: Vector, n: int) -> None:
        self._pool, self._n = pool, n
        self._stride = -(-n * FP32_BYTES // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES // FP32_BYTES
        self._count = max(1, len(pool) // self._stride)
        self._next = 0

    def next(self) -> Vector:
        start = self._next % self._count * self._stride
        self._next += 1
        return self._pool[start : start + self._n]


def _aligned(n: int) -> Vector:
    spare = _ALIGNMENT_BYTES // FP32_BYTES
    values = np.empty(n + spare, np.float32)
    start = -values.ctypes.data % _ALIGNMENT_BYTES // FP32_BYTES
    return values[start : start + n]


def _checked(of: Kernels) -> Kernels:
    """Return `of` once checked. Raises UserError for an algorithm that is not within its error bound."""
    random = np.random.default_rng(_SEED)
    for n in (1, 1000, 100_003):
        x = random.uniform(-20, 20, n).astype(np.float32)
        for algorithm in ALGORITHMS:
            y = np.full(n, np.nan, np.float32)
            of.run(algorithm, x, y)
            if not (np.abs(y - reference(x)) <= error_bound(x, algorithm)).all():
                raise UserError(f"{algorithm} of {n} values is wrong")
    return of


def _setup(isa: str, cause: str, caches: Caches) -> Setup:
    environment = describe((), torch.device("cpu"), "none", {}, "none")
    return Setup(
        isa=isa, status="not run" if cause else "ok", cause=cause, device=cpu_name(),
        l1_bytes=caches.l1, l2_bytes=caches.l2, last_bytes=caches.last,
        compiler=_compiler(), flags=" ".join(ISAS[isa].flags), torch=torch.__version__,
        commit=environment.commit, dirty=environment.dirty,
    )  # fmt: skip


def _compiler() -> str:
    try:
        return compiler().version
    except UserError as error:
        return str(error)
