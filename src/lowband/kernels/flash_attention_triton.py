"""FlashAttention-2 on a GPU (arXiv 2307.08691): one program per block of queries, or of keys, of one head.

[Note: base 2] The GPU's exponential is 2^x. Scores are scaled by s log2(e), so that P = 2^(S' - L'), and the
logsumexp is converted back to base e when it is stored.

[Note: three stretches] With causal masking the keys of a block of queries form three stretches: keys that all
queries see, without a mask; the diagonal, with a mask; and keys that no query sees, which are not read. For a
block of keys the queries form the same stretches in reverse. A block that passes the last key is masked too.

[Note: one block at most] Without a causal mask the masked stretch is the keys after the last whole block:
one block or none. Pipelined like the others, it made ptxas wait after every matrix product of the kernel on
sm_90 (`serialized` in compiled.csv), so it is not pipelined.

[Note: no atomics] The backward computes dk and dv by blocks of keys (each program loops over the queries of
all heads of its group) and dq by blocks of queries: five products become seven, but sums are deterministic.
"""

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl

from lowband.kernels.device import on_its_device
from lowband.kernels.flash_attention_configs import (
    BACKWARD_KEYS,
    BACKWARD_QUERIES,
    FORWARD,
    Tiles,
    classes,
    tuned,
)
from lowband.kernels.variant import Variant

_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)
DELTA_ROWS = 64  # queries per program of the row sums


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, N, Tq, D] and logsumexp [B, N, Tq] fp32 of q [B, N, Tq, D], k and v [B, G, Tk, D]."""
    B, N, Tq, _ = q.shape
    out = torch.empty_like(q)
    logsumexp = torch.empty(B, N, Tq, dtype=torch.float32, device=q.device)
    launch_forward(q, k, v, out, logsumexp, is_causal, scale)
    return out, logsumexp


@on_its_device
def launch_forward(q, k, v, out, logsumexp, is_causal, scale) -> None:
    B, N, Tq, D = q.shape
    _forward[lambda c: (triton.cdiv(Tq, c["ROWS"]), B * N)](
        q, k, v, out, logsumexp, *_strides(q, k, v, out), N, N // k.shape[1], Tq, k.shape[2],
        scale, **classes(Tq, k.shape[2]), HEAD=D, IS_CAUSAL=is_causal,
    )  # fmt: skip


def backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dlogsumexp: torch.Tensor | None,
    is_causal: bool,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of q, k and v, in their shapes, from the output's gradient dout [B, N, Tq, D].

    logsumexp: contiguous; dlogsumexp: its gradient, or None for zeros
    """
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    launch_backward(dout, q, k, v, out, logsumexp, dlogsumexp, dq, dk, dv, is_causal, scale)
    return dq, dk, dv


@on_its_device
def launch_backward(dout, q, k, v, out, logsumexp, dlogsumexp, dq, dk, dv, is_causal, scale) -> None:
    B, N, Tq, D = q.shape
    G, Tk = k.shape[1], k.shape[2]
    delta = torch.empty_like(logsumexp)
    _delta[(triton.cdiv(Tq, DELTA_ROWS), B * N)](
        out, dout, delta, *_strides(out, dout), N, Tq, HEAD=D, ROWS=DELTA_ROWS
    )
    if dlogsumexp is not None:  # of a query without keys it may be anything, such as logaddexp's NaN
        delta -= dlogsumexp.masked_fill(logsumexp == float("-inf"), 0)
    _backward_keys[lambda c: (triton.cdiv(Tk, c["COLUMNS"]), B * G)](
        q, k, v, dout, logsumexp, delta, dk, dv, *_strides(q, k, v, dout, dk, dv), N, N // G, Tq, Tk,
        scale, **classes(Tq, Tk), HEAD=D, IS_CAUSAL=is_causal,
    )  # fmt: skip
    _backward_queries[lambda c: (triton.cdiv(Tq, c["ROWS"]), B * N)](
        q, k, v, dout, logsumexp, delta, dq, *_strides(q, k, v, dout, dq), N, N // G, Tq, Tk,
        scale, **classes(Tq, Tk), HEAD=D, IS_CAUSAL=is_causal,
    )  # fmt: skip


def _strides(*tensors: torch.Tensor) -> list[int]:
    """The strides of each tensor's batch, head and position dims."""
    return [stride for tensor in tensors for stride in tensor.stride()[:3]]


def variants(device: str) -> Iterator[Variant]:
    """Every kernel, with and without a causal mask, at each head size's first tile. device: cuda | hip"""
    rows = dict.fromkeys(("logsumexp", "delta"), "*fp32")
    tensors = dict.fromkeys(("q", "k", "v", "out", "dout", "dq", "dk", "dv"), "*bf16")
    kernels: list[tuple[str, Any, Tiles]] = [
        ("forward", _forward, FORWARD),
        ("backward_keys", _backward_keys, BACKWARD_KEYS),
        ("backward_queries", _backward_queries, BACKWARD_QUERIES),
    ]
    yield Variant(
        "flash_attention.delta", "head 128", _delta, {**tensors, **rows},
        {"HEAD": 128, "ROWS": DELTA_ROWS}, {"num_warps": 4},
    )  # fmt: skip
    for head, is_causal in product(FORWARD[device], (True, False)):
        for kernel, function, tiles in kernels:
            size, columns, warps, stages = tiles[device][head][0]
            mask = "causal" if is_causal else "full"
            yield Variant(
                f"flash_attention.{kernel}",
                f"head {head} {mask} {size}x{columns} warps {warps} stages {stages}",
                function, {**tensors, **rows},
                {"HEAD": head, "IS_CAUSAL": is_causal, "ROWS": size, "COLUMNS": columns},
                {"num_warps": warps, "num_stages": stages}, floats=("scale",),
            )  # fmt: skip


@tuned(FORWARD)
def _forward(
    q, k, v, out,  # pointers to [B, N, Tq, D], [B, G, Tk, D], [B, G, Tk, D], [B, N, Tq, D]
    logsumexp,  # pointer to [B, N, Tq] fp32
    q_b, q_n, q_t, k_b, k_n, k_t, v_b, v_n, v_t, out_b, out_n, out_t,  # strides
    heads, group, queries, keys, scale, queries_class, keys_class,
    HEAD: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # With a causal mask the last queries have the most keys, so they go first.
    block = tl.num_programs(0) - 1 - tl.program_id(0) if IS_CAUSAL else tl.program_id(0)
    b, n = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    rows = block * ROWS + tl.arange(0, ROWS)
    is_row = rows < queries
    q_tile = _load(q + b * q_b + n * q_n, block * ROWS, q_t, queries, True, HEAD, ROWS)
    k_head, v_head = k + b * k_b + n // group * k_n, v + b * v_b + n // group * v_n

    top = tl.full((ROWS,), float("-inf"), tl.float32)  # largest score so far, base 2
    total = tl.zeros((ROWS,), tl.float32)  # of 2^(score - top)
    sums = tl.zeros((ROWS, HEAD), tl.float32)  # of 2^(score - top) v
    whole, end = _keys_of(block, queries, keys, IS_CAUSAL, ROWS, COLUMNS)
    top, total, sums = _forward_stretch(
        top, total, sums, q_tile, k_head, v_head, k_t, v_t, rows, queries, keys, 0, whole, scale * _LOG2E,
        False, IS_CAUSAL, HEAD, COLUMNS,
    )  # fmt: skip
    top, total, sums = _forward_stretch(
        top, total, sums, q_tile, k_head, v_head, k_t, v_t, rows, queries, keys, whole, end, scale * _LOG2E,
        True, IS_CAUSAL, HEAD, COLUMNS,
    )  # fmt: skip

    seen = total > 0.0  # False for a query without keys
    result = sums / tl.where(seen, total, 1.0)[:, None]
    places = _places(out + b * out_b + n * out_n, block * ROWS, out_t, HEAD, ROWS)
    tl.store(places, result.to(out.dtype.element_ty), mask=is_row[:, None])
    stored = tl.where(seen, (top + tl.log2(tl.where(seen, total, 1.0))) * _LN2, float("-inf"))
    tl.store(logsumexp + (b * heads + n) * queries + rows, stored, mask=is_row)


@triton.jit
def _keys_of(
    block, queries, keys, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Ends of the keys that all queries of the block see (whole blocks) and of the keys that any sees."""
    end, all_see = keys, keys
    if IS_CAUSAL:
        offset = keys - queries
        all_see = tl.maximum(tl.minimum(keys, block * ROWS + offset + 1), 0)
        end = tl.maximum(tl.minimum(keys, block * ROWS + ROWS + offset), 0)
    return all_see // COLUMNS * COLUMNS, end


@triton.jit
def _forward_stretch(
    top, total, sums, q_tile, k, v, k_t, v_t, rows, queries, keys, start, end, scale,
    IS_MASKED: tl.constexpr, IS_CAUSAL: tl.constexpr, HEAD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Update (top, total, sums) with the keys from `start` to `end`, and return them."""
    STAGES: tl.constexpr = 1 if IS_MASKED and not IS_CAUSAL else None  # [Note: one block at most]
    for first in tl.range(start, end, COLUMNS, num_stages=STAGES):
        columns = first + tl.arange(0, COLUMNS)
        k_tile = _load(k, first, k_t, keys, IS_MASKED, HEAD, COLUMNS)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # scaled below: one fused product
        if IS_MASKED:
            scores = tl.where(_is_seen(rows, columns, queries, keys, IS_CAUSAL), scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * scale)
        shift = new_top
        if IS_MASKED:  # no key seen yet: -inf minus -inf would be NaN
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores * scale - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weights, axis=1)
        v_tile = _load(v, first, v_t, keys, IS_MASKED, HEAD, COLUMNS)
        sums = tl.dot(weights.to(v_tile.dtype), v_tile, sums * decay[:, None], input_precision="ieee")
        top = new_top
    return top, total, sums


@triton.jit
def _places(head, first, stride, HEAD: tl.constexpr, SIZE: tl.constexpr):
    """Pointers [SIZE, HEAD] to one head's positions from `first` on; only the offsets are 32 bits wide."""
    offsets = tl.arange(0, SIZE)[:, None] * stride + tl.arange(0, HEAD)[None, :]
    return head + first * tl.cast(stride, tl.int64) + offsets


@triton.jit
def _load(head, first, stride, count, IS_MASKED: tl.constexpr, HEAD: tl.constexpr, SIZE: tl.constexpr):
    """The values [SIZE, HEAD] of one head's positions from `first` on; zeros from position `count` on."""
    pointers = _places(head, first, stride, HEAD, SIZE)
    mask = (first + tl.arange(0, SIZE) < count)[:, None]
    return tl.load(pointers, mask=mask, other=0.0) if IS_MASKED else tl.load(pointers)


@triton.jit
def _is_seen(rows, columns, queries, keys, IS_CAUSAL: tl.constexpr):
    """Whether the key exists and the query sees it, [rows, columns]."""
    seen = (columns < keys)[None, :]
    if IS_CAUSAL:
        seen = seen & (columns[None, :] <= rows[:, None] + (keys - queries))
    return seen


@triton.jit
def _delta(
    out, dout,  # pointers to [B, N, Tq, D]
    delta,  # pointer to [B, N, Tq] fp32
    out_b, out_n, out_t, dout_b, dout_n, dout_t, heads, queries,
    HEAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Row sums of out * dout."""
    b, n = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    first = tl.program_id(0) * ROWS
    x = _load(out + b * out_b + n * out_n, first, out_t, queries, True, HEAD, ROWS).to(tl.float32)
    y = _load(dout + b * dout_b + n * dout_n, first, dout_t, queries, True, HEAD, ROWS).to(tl.float32)
    rows = first + tl.arange(0, ROWS)
    tl.store(delta + (b * heads + n) * queries + rows, tl.sum(x * y, axis=1), mask=rows < queries)


@tuned(BACKWARD_KEYS)
def _backward_keys(
    q, k, v, dout,  # pointers to [B, N, Tq, D], [B, G, Tk, D], [B, G, Tk, D], [B, N, Tq, D]
    logsumexp, delta,  # pointers to [B, N, Tq] fp32
    dk, dv,  # pointers to [B, G, Tk, D]
    q_b, q_n, q_t, k_b, k_n, k_t, v_b, v_n, v_t, dout_b, dout_n, dout_t, dk_b, dk_n, dk_t, dv_b, dv_n, dv_t,
    heads, group, queries, keys, scale, queries_class, keys_class,
    HEAD: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block, kv_heads = tl.program_id(0), heads // group
    b, g = (tl.program_id(1) // kv_heads).to(tl.int64), (tl.program_id(1) % kv_heads).to(tl.int64)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    k_tile = _load(k + b * k_b + g * k_n, block * COLUMNS, k_t, keys, True, HEAD, COLUMNS)
    v_tile = _load(v + b * v_b + g * v_n, block * COLUMNS, v_t, keys, True, HEAD, COLUMNS)
    dk_sums = tl.zeros((COLUMNS, HEAD), tl.float32)
    dv_sums = tl.zeros((COLUMNS, HEAD), tl.float32)

    # Queries before `start` see none of these keys; queries from `whole` on see all of them.
    start, whole = 0, 0
    if IS_CAUSAL:
        offset = keys - queries
        start = tl.maximum(block * COLUMNS - offset, 0) // ROWS * ROWS
        whole = tl.maximum(block * COLUMNS + COLUMNS - 1 - offset, 0)
        whole = tl.minimum((whole + ROWS - 1) // ROWS * ROWS, queries)
    for member in range(group):
        n = g * group + member
        q_head, dout_head = q + b * q_b + n * q_n, dout + b * dout_b + n * dout_n
        row_start = (b * heads + n) * queries
        if IS_CAUSAL:
            dk_sums, dv_sums = _keys_stretch(
                dk_sums, dv_sums, q_head, dout_head, k_tile, v_tile, logsumexp + row_start,
                delta + row_start, q_t, dout_t, columns, queries, keys, start, whole, scale, True, HEAD, ROWS,
            )  # fmt: skip
        dk_sums, dv_sums = _keys_stretch(
            dk_sums, dv_sums, q_head, dout_head, k_tile, v_tile, logsumexp + row_start, delta + row_start,
            q_t, dout_t, columns, queries, keys, whole, queries, scale, False, HEAD, ROWS,
        )  # fmt: skip

    is_key = (columns < keys)[:, None]
    dk_places = _places(dk + b * dk_b + g * dk_n, block * COLUMNS, dk_t, HEAD, COLUMNS)
    dv_places = _places(dv + b * dv_b + g * dv_n, block * COLUMNS, dv_t, HEAD, COLUMNS)
    tl.store(dk_places, (dk_sums * scale).to(dk.dtype.element_ty), mask=is_key)
    tl.store(dv_places, dv_sums.to(dv.dtype.element_ty), mask=is_key)


@triton.jit
def _keys_stretch(
    dk_sums, dv_sums, q, dout, k_tile, v_tile, logsumexp, delta, q_t, dout_t, columns, queries, keys,
    start, end, scale,
    IS_DIAGONAL: tl.constexpr, HEAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add the queries from `start` to `end` to (dk_sums, dv_sums), and return them.

    Beyond the last query dout and q are zeros, so they add nothing.
    """
    for first in range(start, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        q_tile = _load(q, first, q_t, queries, True, HEAD, ROWS)
        row_log, row_delta = _row_values(logsumexp, delta, rows, queries)
        # Transposed, [columns, rows], as the products below need them.
        scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee") * (scale * _LOG2E)
        weights = tl.exp2(scores - row_log[None, :])
        if IS_DIAGONAL:
            weights = tl.where(columns[:, None] <= rows[None, :] + (keys - queries), weights, 0.0)
        dout_tile = _load(dout, first, dout_t, queries, True, HEAD, ROWS)
        dv_sums = tl.dot(weights.to(dout_tile.dtype), dout_tile, dv_sums, input_precision="ieee")
        dweights = tl.dot(v_tile, tl.trans(dout_tile), input_precision="ieee")
        dscores = weights * (dweights - row_delta[None, :])
        dk_sums = tl.dot(dscores.to(q_tile.dtype), q_tile, dk_sums, input_precision="ieee")
    return dk_sums, dv_sums


@triton.jit
def _row_values(logsumexp, delta, rows, queries):
    """The logsumexp, base 2, and delta of these queries."""
    is_row = rows < queries
    row_log = tl.load(logsumexp + rows, mask=is_row, other=0.0) * _LOG2E
    return row_log, tl.load(delta + rows, mask=is_row, other=0.0)


@tuned(BACKWARD_QUERIES)
def _backward_queries(
    q, k, v, dout,  # pointers to [B, N, Tq, D], [B, G, Tk, D], [B, G, Tk, D], [B, N, Tq, D]
    logsumexp, delta,  # pointers to [B, N, Tq] fp32
    dq,  # pointer to [B, N, Tq, D]
    q_b, q_n, q_t, k_b, k_n, k_t, v_b, v_n, v_t, dout_b, dout_n, dout_t, dq_b, dq_n, dq_t,
    heads, group, queries, keys, scale, queries_class, keys_class,
    HEAD: tl.constexpr, IS_CAUSAL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0) if IS_CAUSAL else tl.program_id(0)
    b, n = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    rows = block * ROWS + tl.arange(0, ROWS)
    q_tile = _load(q + b * q_b + n * q_n, block * ROWS, q_t, queries, True, HEAD, ROWS)
    dout_tile = _load(dout + b * dout_b + n * dout_n, block * ROWS, dout_t, queries, True, HEAD, ROWS)
    row_start = (b * heads + n) * queries
    row_log, row_delta = _row_values(logsumexp + row_start, delta + row_start, rows, queries)
    k_head, v_head = k + b * k_b + n // group * k_n, v + b * v_b + n // group * v_n

    sums = tl.zeros((ROWS, HEAD), tl.float32)
    whole, end = _keys_of(block, queries, keys, IS_CAUSAL, ROWS, COLUMNS)
    sums = _queries_stretch(
        sums, q_tile, dout_tile, k_head, v_head, k_t, v_t, row_log, row_delta, rows, queries, keys,
        0, whole, scale, False, IS_CAUSAL, HEAD, COLUMNS,
    )  # fmt: skip
    sums = _queries_stretch(
        sums, q_tile, dout_tile, k_head, v_head, k_t, v_t, row_log, row_delta, rows, queries, keys,
        whole, end, scale, True, IS_CAUSAL, HEAD, COLUMNS,
    )  # fmt: skip
    places = _places(dq + b * dq_b + n * dq_n, block * ROWS, dq_t, HEAD, ROWS)
    tl.store(places, (sums * scale).to(dq.dtype.element_ty), mask=(rows < queries)[:, None])


@triton.jit
def _queries_stretch(
    sums, q_tile, dout_tile, k, v, k_t, v_t, row_log, row_delta, rows, queries, keys, start, end, scale,
    IS_MASKED: tl.constexpr, IS_CAUSAL: tl.constexpr, HEAD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the keys from `start` to `end` to the sums of dq, and return them."""
    STAGES: tl.constexpr = 1 if IS_MASKED and not IS_CAUSAL else None  # [Note: one block at most]
    for first in tl.range(start, end, COLUMNS, num_stages=STAGES):
        columns = first + tl.arange(0, COLUMNS)
        k_tile = _load(k, first, k_t, keys, IS_MASKED, HEAD, COLUMNS)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * (scale * _LOG2E)
        weights = tl.exp2(scores - row_log[:, None])
        if IS_MASKED:
            weights = tl.where(_is_seen(rows, columns, queries, keys, IS_CAUSAL), weights, 0.0)
        v_tile = _load(v, first, v_t, keys, IS_MASKED, HEAD, COLUMNS)
        dweights = tl.dot(dout_tile, tl.trans(v_tile), input_precision="ieee")
        dscores = weights * (dweights - row_delta[:, None])
        sums = tl.dot(dscores.to(k_tile.dtype), k_tile, sums, input_precision="ieee")
    return sums
