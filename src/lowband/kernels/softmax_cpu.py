"""Softmax of one fp32 vector on one core: the three algorithms of arXiv 2001.04438, vectorised in C.

`softmax_cpu.c` implements and explains the algorithms; compiled for AVX2 it handles 8 values at a time, for
AVX512 16. `cost/softmax.py` has their costs, `bench/softmax.py` measures them.
"""

import ctypes
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowband.cost.softmax import ALGORITHMS, PASSES, TWO_PASS
from lowband.errors import UserError
from lowband.kernels.c_library import load, processor_features

SOURCE = Path(__file__).with_suffix(".c")
_FLAGS = ("-std=gnu11", "-O3")


class Isa(NamedTuple):
    """An instruction set: its usual name, the required processor features, the compiler flags."""

    title: str
    features: frozenset[str]
    flags: tuple[str, ...]


# Widest first: the first one that the processor supports is used.
ISAS = {
    "AVX512": Isa("AVX-512", frozenset({"avx512f"}), (*_FLAGS, "-DLANES=16", "-mavx512f")),
    "AVX2": Isa("AVX2", frozenset({"avx2", "fma"}), (*_FLAGS, "-DLANES=8", "-mavx2", "-mfma")),
}


def missing(isa: str) -> str:
    """Why this processor cannot run an instruction set, in a few words; empty if it can."""
    return "" if ISAS[isa].features <= processor_features() else f"no {ISAS[isa].title} here"


class Kernels:
    """The compiled functions of one instruction set. Raises UserError if they cannot be compiled or run."""

    def __init__(self, isa: str) -> None:
        if cause := missing(isa):
            raise UserError(cause)
        library = load(SOURCE, ISAS[isa].flags)
        self._seconds = library.softmax_seconds
        self._seconds.restype = ctypes.c_double
        self._calls = {name: _function(library, name) for name in (*ALGORITHMS, *PASSES)}

    def run(self, name: str, x: NDArray[np.float32], y: NDArray[np.float32]) -> None:
        """Run one algorithm, or a pass that only moves data, from x to y.

        x, y: [n] fp32, contiguous, n >= 1, not overlapping
        """
        self._calls[name](*_pointers(x, y))

    def seconds(self, name: str, x: NDArray[np.float32], y: NDArray[np.float32]) -> float:
        """Time of one `run`, in seconds. x is read once before, so the caches hold as much as fits."""
        return float(self._seconds(self._calls[name], *_pointers(x, y)))


@cache
def kernels(isa: str) -> Kernels:
    """The functions of an instruction set, compiled once. Raises UserError if that is impossible."""
    return Kernels(isa)


def softmax(x: NDArray[np.float32], algorithm: str = TWO_PASS, isa: str | None = None) -> NDArray[np.float32]:
    """e^(x_i) / sum_j e^(x_j) of a vector.

    x:         [n] fp32, n >= 1
    algorithm: a name in ALGORITHMS
    isa:       a name in ISAS; default: the widest that this processor has
    Returns [n] fp32, within `error_bound` of exact arithmetic. Results below the smallest normal number
    (1.2e-38) may be 0. A NaN, a +inf or nothing but -inf gives NaN everywhere, as torch.softmax does.
    Raises UserError for other input, and if the instruction set or a C compiler is missing.
    """
    if algorithm not in ALGORITHMS:
        raise UserError(f"unknown algorithm '{algorithm}'", allowed=ALGORITHMS)
    if isa is not None and isa not in ISAS:
        raise UserError(f"unknown instruction set '{isa}'", allowed=ISAS)
    if x.ndim != 1 or x.dtype != np.float32 or not len(x):
        raise UserError(
            f"{x.dtype} of shape {x.shape}", where="softmax", allowed="float32 of shape (n,), n >= 1"
        )
    chosen = isa or next((name for name in ISAS if not missing(name)), "AVX2")
    y = np.empty_like(x, order="C")
    kernels(chosen).run(algorithm, np.ascontiguousarray(x), y)
    return y


def reference(x: NDArray[np.floating[Any]]) -> NDArray[np.float64]:
    """Softmax of a vector by its definition, in float64, shifted by the largest value. [n] -> [n]"""
    with np.errstate(invalid="ignore"):  # inf - inf is intended
        e = np.exp(x.astype(np.float64) - np.float64(x.max()))
        return np.asarray(e / e.sum())


_ULP = 2.0**-24  # half the spacing of fp32 numbers above 1: the error of one rounding
_BLOCK, _CHUNK = 32, 8192  # UNROLL * LANES of AVX2, CHUNK of the C file


def error_bound(x: NDArray[np.float32], algorithm: str) -> NDArray[np.float64]:
    """The largest error of each output against exact arithmetic. [n] -> [n]

    Relative: the polynomial and its roundings (4 in the output, 4 in the sum), 4 for the output's products
    and the sum's last steps, and one per block that is added to a lane before the lanes are added in float64.
    Three-pass algorithms also round x - max, which e^x turns into a relative error of |x - max| roundings,
    both in the output and in the sum; two-pass does not. Absolute: twice the smallest normal number, for
    results that are flushed to 0.
    """
    blocks = -(-min(len(x), _CHUNK) // _BLOCK)
    exact = reference(x)
    with np.errstate(invalid="ignore"):
        shift = np.minimum(np.float64(x.max()) - x.astype(np.float64), 200)  # beyond, e^x is 0
    roundings = np.full(len(x), 12.0 + blocks)
    if algorithm != TWO_PASS:
        roundings += shift + float(exact @ shift)
    return np.asarray(roundings * _ULP * exact + 2.0**-125)


def _function(library: ctypes.CDLL, name: str) -> Any:
    suffix = name.replace("-", "_").replace(" ", "_")
    return library[f"softmax_{suffix}" if name in ALGORITHMS else f"softmax_{suffix}_pass"]


def _pointers(x: NDArray[np.float32], y: NDArray[np.float32]) -> tuple[Any, Any, ctypes.c_size_t]:
    return x.ctypes.data_as(ctypes.c_void_p), y.ctypes.data_as(ctypes.c_void_p), ctypes.c_size_t(len(x))
