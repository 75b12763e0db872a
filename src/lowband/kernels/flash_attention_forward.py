"""FlashAttention-2's forward on a GPU: one program per block of queries of one head."""

import triton
import triton.language as tl

from lowband.kernels.flash_attention_configs import FORWARD, tuned
from lowband.kernels.flash_attention_pieces import LN2, LOG2E, ends, exists, load, places, stretches, tanh


@tuned(FORWARD)
def flash_forward(
    q, k, v, out,  # pointers to [B, N, Tq, D], [B, G, Tk, D], [B, G, Tk, D], [B, N, Tq, D]
    logsumexp,  # pointer to [B, N, Tq] fp32
    spans,  # pointer to [B, 2, Tq] int32, or None
    q_b, q_n, q_t, k_b, k_n, k_t, v_b, v_n, v_t, out_b, out_n, out_t,  # strides
    spans_step, heads, group, queries, keys, scale, softcap, queries_class, keys_class,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr, IS_CAPPED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    # With a causal mask the last queries have the most keys, so they go first.
    block = tl.num_programs(0) - 1 - tl.program_id(0) if MASK == "causal" else tl.program_id(0)
    b, n = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    rows = block * ROWS + tl.arange(0, ROWS)
    is_row = rows < queries
    q_tile = load(q + b * q_b + n * q_n, block * ROWS, q_t, queries, True, HEAD, WIDTH, ROWS)
    k_head, v_head = k + b * k_b + n // group * k_n, v + b * v_b + n // group * v_n

    top = tl.full((ROWS,), float("-inf"), tl.float32)  # largest score so far, base 2
    total = tl.zeros((ROWS,), tl.float32)  # of 2^(score - top)
    sums = tl.zeros((ROWS, WIDTH), tl.float32)  # of 2^(score - top) v
    if MASK == "spans":
        spans += b * spans_step
        row_first, row_end = ends(spans, rows, queries)
        start, whole, whole_end, end = stretches(spans, block * ROWS, queries, ROWS, COLUMNS)
        top, total, sums = stretch(
            top, total, sums, q_tile, k_head, v_head, k_t, v_t, row_first, row_end, keys, start, whole,
            scale, softcap, True, HEAD, WIDTH, MASK, IS_CAPPED, COLUMNS,
        )  # fmt: skip
    else:
        whole = 0
        row_first, row_end, whole_end, end = keys_of(block, rows, queries, keys, MASK, ROWS, COLUMNS)
    top, total, sums = stretch(
        top, total, sums, q_tile, k_head, v_head, k_t, v_t, row_first, row_end, keys, whole, whole_end,
        scale, softcap, False, HEAD, WIDTH, MASK, IS_CAPPED, COLUMNS,
    )  # fmt: skip
    top, total, sums = stretch(
        top, total, sums, q_tile, k_head, v_head, k_t, v_t, row_first, row_end, keys, whole_end, end,
        scale, softcap, True, HEAD, WIDTH, MASK, IS_CAPPED, COLUMNS,
    )  # fmt: skip

    seen = total > 0.0  # False for a query without keys
    result = sums / tl.where(seen, total, 1.0)[:, None]
    pointers = places(out + b * out_b + n * out_n, block * ROWS, out_t, WIDTH, ROWS)
    tl.store(pointers, result.to(out.dtype.element_ty), mask=exists(is_row, HEAD, WIDTH))
    stored = tl.where(seen, (top + tl.log2(tl.where(seen, total, 1.0))) * LN2, float("-inf"))
    tl.store(logsumexp + (b * heads + n) * queries + rows, stored, mask=is_row)


@triton.jit
def keys_of(
    block, rows, queries, keys, MASK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Without spans: both ends of each row's keys; ends of those that all see (whole blocks) and any sees."""
    row_end, all_see, end = rows * 0 + keys, keys, keys
    if MASK == "causal":
        offset = keys - queries
        row_end = tl.minimum(rows + offset + 1, keys)
        all_see = tl.maximum(tl.minimum(keys, block * ROWS + offset + 1), 0)
        end = tl.maximum(tl.minimum(keys, block * ROWS + ROWS + offset), 0)
    return rows * 0, row_end, all_see // COLUMNS * COLUMNS, end


@triton.jit
def is_seen(columns, row_first, row_end, MASK: tl.constexpr):
    """Whether the row sees the key, [rows, columns]."""
    seen = columns[None, :] < row_end[:, None]
    if MASK == "spans":
        seen = seen & (columns[None, :] >= row_first[:, None])
    return seen


@triton.jit
def stretch(
    top, total, sums, q_tile, k, v, k_t, v_t, row_first, row_end, keys, start, end, scale, softcap,
    IS_MASKED: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr,
    IS_CAPPED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Update (top, total, sums) with the keys from `start` to `end`, and return them."""
    STAGES: tl.constexpr = 1 if IS_MASKED and MASK == "full" else None  # [Note: one block at most]
    factor = (softcap if IS_CAPPED else scale) * LOG2E
    for first in tl.range(start, end, COLUMNS, num_stages=STAGES):
        columns = first + tl.arange(0, COLUMNS)
        k_tile = load(k, first, k_t, keys, IS_MASKED, HEAD, WIDTH, COLUMNS)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")  # scaled below: one fused product
        if IS_CAPPED:
            scores = tanh(scores * (scale / softcap))
        if IS_MASKED:
            scores = tl.where(is_seen(columns, row_first, row_end, MASK), scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, axis=1) * factor)
        shift = new_top
        if IS_MASKED:  # no key seen yet: -inf minus -inf would be NaN
            shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores * factor - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weights, axis=1)
        v_tile = load(v, first, v_t, keys, IS_MASKED, HEAD, WIDTH, COLUMNS)
        sums = tl.dot(weights.to(v_tile.dtype), v_tile, sums * decay[:, None], input_precision="ieee")
        top = new_top
    return top, total, sums
