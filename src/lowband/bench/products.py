"""Matrix products of numpy in fp32 on one thread, and what predicts them: peak, rates of copies, fixed time.

Rounds over all shapes, in another order each; processor time of this thread, so that what else runs is not
counted. Operands stay in the caches that hold them.
"""

import ctypes
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from lowband.cost.products import Tile
from lowband.errors import UserError

ROUNDS = 20
TIMED_S = 3e-4  # a timing repeats its call for so long
# The tile that OpenBLAS's sgemm computes in registers, by the processor that it found: its kernels are
# sgemm_kernel_8x4_haswell_2.c and sgemm_kernel_16x4_skylakex_3.c. They are of matrices stored by columns, so
# for a product of numpy, stored by rows, the sides are exchanged.
TILES = {"Haswell": Tile(4, 8), "Zen": Tile(4, 8), "SkylakeX": Tile(4, 16)}
NARROW = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33)
HIDDEN, TOKENS = 768, 256
SLICES = (1, 2, 3, 6, 8, 12)  # ranks over which a layer is cut
PEAK, SMALLEST = 1536, 1
APART = 520  # values between the places in a page of a copy's source and target: equal places are slow
COPIES = (2**12, 2**15, 2**18, 2**20, 2**24)  # values


class Shape(NamedTuple):
    """kind: what it shows; peak, fixed and copy are facts. A copy has its values as columns, and inner 0."""

    kind: str
    rows: int
    columns: int
    inner: int


class Timing(NamedTuple):
    """One timing. time_s: processor time of one call; core, tile: of numpy's OpenBLAS"""

    kind: str
    rows: int
    columns: int
    inner: int
    round: int
    time_s: float
    core: str
    tile_rows: int
    tile_columns: int


FACTS = [
    Shape("peak", PEAK, PEAK, PEAK),
    Shape("fixed", SMALLEST, SMALLEST, SMALLEST),
    *(Shape("copy", 1, values, 0) for values in COPIES),
]
SHAPES = [
    *(Shape("columns at a tile's border", 256, columns, 256) for columns in range(249, 266)),
    *(Shape("rows at a tile's border", rows, 256, 256) for rows in range(249, 266)),
    *(Shape("few columns", 1024, columns, 1024) for columns in NARROW),
    *(Shape("few rows", rows, 1024, 1024) for rows in NARROW),
    *(Shape("short sums", 512, 512, inner) for inner in (1, 2, 4, 8, 16, 32, 64, 128)),
    *(Shape("a layer's slice", TOKENS, 4 * HIDDEN // tp, HIDDEN) for tp in SLICES),
    *(Shape("a layer's slice", TOKENS, HIDDEN, 4 * HIDDEN // tp) for tp in SLICES),
    *(Shape("square", n, n, n) for n in (32, 48, 64, 80, 96, 100, 128, 192, 300, 384, 512, 768, 1000, 1024)),
]


def bench(_root: Path) -> list[Timing]:
    """ROUNDS timings of each shape. Raises UserError where numpy's BLAS is none whose tile is known."""
    core = _one_thread()
    if core not in TILES:
        raise UserError(f"the tile of OpenBLAS on '{core}' is not known", allowed=TILES)
    calls = {shape: _call(shape) for shape in [*FACTS, *SHAPES]}
    repeats = {shape: max(1, round(TIMED_S / _time(call, 1))) for shape, call in calls.items() if call()}
    found = []
    for number in range(ROUNDS):
        order = [*calls]
        random.Random(number).shuffle(order)
        found += [
            Timing(*shape, number, _time(calls[shape], repeats[shape]), core, *TILES[core]) for shape in order
        ]
    return found


def _one_thread() -> str:
    """Limit numpy's OpenBLAS to one thread; the name of the processor that it found."""
    folder = Path(np.__file__).parent.parent / "numpy.libs"
    libraries = sorted(folder.glob("libscipy_openblas64_*.so"))
    if not libraries:
        raise UserError("numpy comes without an OpenBLAS of its own", where=folder, allowed="numpy's wheel")
    blas = ctypes.CDLL(str(libraries[0]))
    blas.scipy_openblas_set_num_threads64_(1)
    blas.scipy_openblas_get_corename64_.restype = ctypes.c_char_p
    name: bytes = blas.scipy_openblas_get_corename64_()
    return name.decode()


def _call(shape: Shape) -> Callable[[], bool]:
    values = np.random.default_rng(1)
    if shape.kind == "copy":
        source = values.random(shape.columns, np.float32)
        target = np.empty(shape.columns + APART, np.float32)[APART:]

        def copy() -> bool:
            np.copyto(target, source)
            return True

        return copy
    left = values.random((shape.rows, shape.inner), np.float32)
    right = values.random((shape.inner, shape.columns), np.float32)
    product = np.empty((shape.rows, shape.columns), np.float32)

    def multiply() -> bool:
        np.matmul(left, right, out=product)
        return True

    return multiply


def _time(call: Callable[[], bool], repeats: int) -> float:
    begun = time.thread_time()
    for _ in range(repeats):
        call()
    return max(time.thread_time() - begun, 1e-9) / repeats
