"""Softmax on a GPU: a program handles one long row, or several short ones, and loops over it in tiles.

State is kept per column of a tile and combined once, after the last tile: the loop contains no reduction.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl

from lowband.cost.softmax import GPU_ALGORITHMS
from lowband.kernels.device import on_its_device
from lowband.kernels.variant import Variant

TILE = 8192  # most values that a program handles at a time
WARPS = 8

_LOG2E = tl.constexpr(1.4426950408889634)
# ln 2 in two parts, so that x - n ln 2 keeps x's own precision.
_LN2_HIGH = tl.constexpr(0.693145751953125)
_LN2_LOW = tl.constexpr(1.4286068203094172e-06)
_HALF_LN2 = tl.constexpr(0.34657359027997264)
_NOTHING = tl.constexpr(-3.0e38)  # the exponent of an empty sum
_EXACT = tl.constexpr(65536.0)  # below it n is the nearest integer to x log2 e, and n ln 2 exact enough


def forward(x: torch.Tensor, algorithm: str) -> torch.Tensor:
    """Softmax of the rows of x [rows, columns], contiguous."""
    y = torch.empty_like(x)
    launch_forward(x, y, algorithm)
    return y


@on_its_device
def launch_forward(x: torch.Tensor, y: torch.Tensor, algorithm: str) -> None:
    rows, columns = x.shape
    constants = tile(columns)
    function, more = kernel(algorithm)
    function[(triton.cdiv(rows, constants["ROWS"]),)](
        x, y, rows, columns, **constants, **more, num_warps=WARPS
    )


def backward(y: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    """Gradient of x from y = softmax(x) and y's gradient, each [rows, columns], contiguous."""
    dx = torch.empty_like(y)
    launch_backward(y, dy, dx)
    return dx


@on_its_device
def launch_backward(y: torch.Tensor, dy: torch.Tensor, dx: torch.Tensor) -> None:
    rows, columns = y.shape
    constants = tile(columns)
    _backward[(triton.cdiv(rows, constants["ROWS"]),)](y, dy, dx, rows, columns, **constants, num_warps=WARPS)


def kernel(algorithm: str) -> tuple[triton.JITFunction, dict[str, bool]]:
    """An algorithm's kernel, and its constants in addition to the tile's."""
    if algorithm in ("recompute", "reload"):
        return _three_pass, {"IS_RELOADED": algorithm == "reload"}
    return {"online": _online, "two_pass": _two_pass}[algorithm], {}


def tile(columns: int) -> dict[str, int]:
    """Rows and columns that a program handles at a time, for rows of this length."""
    width = min(TILE, triton.next_power_of_2(columns))
    return {"ROWS": max(1, TILE // 4 // width), "WIDTH": width}


def variants(_device: str) -> Iterator[Variant]:
    """Every kernel, for rows as long as a large vocabulary."""
    columns = 65536
    options, constants = {"num_warps": WARPS}, tile(columns)
    for algorithm in GPU_ALGORITHMS:
        function, more = kernel(algorithm)
        yield Variant(
            f"softmax.{algorithm}", f"{columns} columns", function, {"x": "*fp32", "y": "*fp32"},
            {**constants, **more}, options, aligned=("columns",),
        )  # fmt: skip
    yield Variant(
        "softmax.backward", f"{columns} columns", _backward,
        {"y": "*fp32", "dy": "*fp32", "dx": "*fp32"}, constants, options,
        aligned=("columns",),
    )  # fmt: skip


@triton.jit
def _three_pass(
    x, y,  # pointers to [rows, columns]
    rows, columns,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, IS_RELOADED: tl.constexpr,
):  # fmt: skip
    start, is_row = _rows(rows, columns, ROWS)
    top = tl.full((ROWS, WIDTH), float("-inf"), tl.float32)
    for first in range(0, columns, WIDTH):
        value = _load(x, start, is_row, first, columns, WIDTH, float("-inf"))
        top = tl.maximum(top, value)  # may lose a NaN, which the sum then keeps
    row_top = tl.max(top, axis=1)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(0, columns, WIDTH):
        value = _load(x, start, is_row, first, columns, WIDTH, float("-inf"))
        weight = tl.exp2((value - row_top[:, None]) * _LOG2E)
        if IS_RELOADED:
            _store(y, weight, start, is_row, first, columns, WIDTH)
        total += weight
    factor = 1.0 / tl.sum(total, axis=1)
    if IS_RELOADED:
        tl.debug_barrier()  # other threads may read what this one has written
        for first in range(0, columns, WIDTH):
            weight = _load(y, start, is_row, first, columns, WIDTH, 0.0)
            _store(y, weight * factor[:, None], start, is_row, first, columns, WIDTH)
    else:
        _write_weights(x, y, start, is_row, columns, row_top, factor, WIDTH)


@triton.jit
def _online(x, y, rows, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    start, is_row = _rows(rows, columns, ROWS)
    top = tl.full((ROWS, WIDTH), float("-inf"), tl.float32)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(0, columns, WIDTH):
        value = _load(x, start, is_row, first, columns, WIDTH, float("-inf"))
        new_top = tl.maximum(top, value)
        shift = tl.where(
            new_top == float("-inf"), 0.0, new_top
        )  # no value so far: -inf minus -inf would be NaN
        total = total * tl.exp2((top - shift) * _LOG2E) + tl.exp2((value - shift) * _LOG2E)
        top = new_top
    row_top = tl.max(top, axis=1)
    factor = 1.0 / tl.sum(total * tl.exp2((top - row_top[:, None]) * _LOG2E), axis=1)
    _write_weights(x, y, start, is_row, columns, row_top, factor, WIDTH)


@triton.jit
def _write_weights(x, y, start, is_row, columns, row_top, factor, WIDTH: tl.constexpr):
    """The last pass: e^(x - max) factor."""
    for first in range(0, columns, WIDTH):
        value = _load(x, start, is_row, first, columns, WIDTH, float("-inf"))
        weight = tl.exp2((value - row_top[:, None]) * _LOG2E)
        _store(y, weight * factor[:, None], start, is_row, first, columns, WIDTH)


@triton.jit
def _two_pass(x, y, rows, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    start, is_row = _rows(rows, columns, ROWS)
    mantissa = tl.zeros((ROWS, WIDTH), tl.float32)
    exponent = tl.full((ROWS, WIDTH), _NOTHING, tl.float32)
    for first in range(0, columns, WIDTH):
        m, n = _exp_pair(_load(x, start, is_row, first, columns, WIDTH, float("-inf")))
        largest = tl.maximum(exponent, n)
        mantissa = mantissa * _power_of_two(exponent - largest) + m * _power_of_two(n - largest)
        exponent = largest
    row_exponent = tl.max(exponent, axis=1)
    total = tl.sum(mantissa * _power_of_two(exponent - row_exponent[:, None]), axis=1)
    # Rows that pairs cannot represent exactly (huge numbers, an infinity, a NaN) take three passes.
    is_exact = (row_exponent > -_EXACT) & (row_exponent < _EXACT) & (total > 0.0)
    if tl.min(tl.where(is_row, is_exact.to(tl.int32), 1)) == 0:
        _three_pass(x, y, rows, columns, ROWS, WIDTH, False)
    else:
        factor = 1.0 / total
        for first in range(0, columns, WIDTH):
            m, n = _exp_pair(_load(x, start, is_row, first, columns, WIDTH, float("-inf")))
            weight = m * factor[:, None] * _power_of_two(n - row_exponent[:, None])
            _store(y, weight, start, is_row, first, columns, WIDTH)


@triton.jit
def _exp_pair(x):
    """e^x = m 2^n: m in [2^-1/2, 2^1/2], n an integer, as a float. For huge x only n's magnitude is right."""
    n = tl.minimum(tl.floor(x * _LOG2E + 0.5), -_NOTHING)
    rest = tl.fma(n, tl.full(n.shape, -_LN2_HIGH, tl.float32), x)
    rest = tl.fma(n, tl.full(n.shape, -_LN2_LOW, tl.float32), rest)
    rest = tl.where(rest > _HALF_LN2, _HALF_LN2, tl.where(rest < -_HALF_LN2, -_HALF_LN2, rest)) + (x - x)
    is_nothing = n < _NOTHING  # e^x is 0, and has no exponent
    return tl.where(is_nothing, 0.0, tl.exp2(rest * _LOG2E)), tl.where(is_nothing, _NOTHING, n)


@triton.jit
def _power_of_two(n):
    """2^n for integers n <= 0 (as floats), exact, made from its bits; 0 below the smallest normal number."""
    n = tl.maximum(n, -127.0).to(tl.int32)
    return ((n + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _backward(y, dy, dx, rows, columns, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    start, is_row = _rows(rows, columns, ROWS)
    total = tl.zeros((ROWS, WIDTH), tl.float32)
    for first in range(0, columns, WIDTH):
        weight = _load(y, start, is_row, first, columns, WIDTH, 0.0)
        total += weight * _load(dy, start, is_row, first, columns, WIDTH, 0.0)
    row_total = tl.sum(total, axis=1)
    for first in range(0, columns, WIDTH):
        weight = _load(y, start, is_row, first, columns, WIDTH, 0.0)
        change = _load(dy, start, is_row, first, columns, WIDTH, 0.0) - row_total[:, None]
        _store(dx, weight * change, start, is_row, first, columns, WIDTH)


@triton.jit
def _rows(rows, columns, ROWS: tl.constexpr):
    """Where this program's rows start, and which of them exist."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    return row * columns, row < rows


@triton.jit
def _load(base, start, is_row, first, columns, WIDTH: tl.constexpr, other):
    """The columns from `first` on, [rows, WIDTH] fp32; `other` beyond the last column."""
    column = first + tl.arange(0, WIDTH)
    mask = is_row[:, None] & (column < columns)[None, :]
    return tl.load(base + start[:, None] + column[None, :], mask=mask, other=other).to(tl.float32)


@triton.jit
def _store(base, value, start, is_row, first, columns, WIDTH: tl.constexpr):
    column = first + tl.arange(0, WIDTH)
    mask = is_row[:, None] & (column < columns)[None, :]
    tl.store(base + start[:, None] + column[None, :], value.to(base.dtype.element_ty), mask=mask)
