"""FlashAttention-2's backward on a GPU: dk and dv by blocks of keys, dq by blocks of queries.

[Note: no atomics] Each program of a block of keys loops over the queries of all heads of its group, and dq
has programs of its own: five products become seven, but sums are deterministic.
"""

import triton
import triton.language as tl

from lowband.kernels.flash_attention_configs import BACKWARD_KEYS, BACKWARD_QUERIES, tuned
from lowband.kernels.flash_attention_forward import is_seen, keys_of
from lowband.kernels.flash_attention_pieces import LOG2E, ends, exists, load, places, stretches, tanh


@triton.jit
def flash_delta(
    out, dout,  # pointers to [B, N, Tq, D]
    delta,  # pointer to [B, N, Tq] fp32
    out_b, out_n, out_t, dout_b, dout_n, dout_t, heads, queries,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Row sums of out * dout."""
    b, n = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    first = tl.program_id(0) * ROWS
    x = load(out + b * out_b + n * out_n, first, out_t, queries, True, HEAD, WIDTH, ROWS).to(tl.float32)
    y = load(dout + b * dout_b + n * dout_n, first, dout_t, queries, True, HEAD, WIDTH, ROWS).to(tl.float32)
    rows = first + tl.arange(0, ROWS)
    tl.store(delta + (b * heads + n) * queries + rows, tl.sum(x * y, axis=1), mask=rows < queries)


@triton.jit
def gradient_of_scores(weights, dweights, delta, tanhs, IS_CAPPED: tl.constexpr):
    dscores = weights * (dweights - delta)
    if IS_CAPPED:
        dscores = dscores * (1 - tanhs * tanhs)
    return dscores


@tuned(BACKWARD_KEYS)
def flash_backward_keys(
    q, k, v, dout,  # pointers to [B, N, Tq, D], [B, G, Tk, D], [B, G, Tk, D], [B, N, Tq, D]
    logsumexp, delta,  # pointers to [B, N, Tq] fp32
    spans,  # pointer to [B, 2, Tk] int32, or None
    dk, dv,  # pointers to [B, G, Tk, D]
    q_b, q_n, q_t, k_b, k_n, k_t, v_b, v_n, v_t, dout_b, dout_n, dout_t, dk_b, dk_n, dk_t, dv_b, dv_n, dv_t,
    spans_step, heads, group, queries, keys, scale, softcap, queries_class, keys_class,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr, IS_CAPPED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block, kv_heads = tl.program_id(0), heads // group
    b, g = (tl.program_id(1) // kv_heads).to(tl.int64), (tl.program_id(1) % kv_heads).to(tl.int64)
    columns = block * COLUMNS + tl.arange(0, COLUMNS)
    k_tile = load(k + b * k_b + g * k_n, block * COLUMNS, k_t, keys, True, HEAD, WIDTH, COLUMNS)
    v_tile = load(v + b * v_b + g * v_n, block * COLUMNS, v_t, keys, True, HEAD, WIDTH, COLUMNS)
    dk_sums = tl.zeros((COLUMNS, WIDTH), tl.float32)
    dv_sums = tl.zeros((COLUMNS, WIDTH), tl.float32)

    # Queries before `start` see none of these keys; those from `whole` to `whole_end` see all of them.
    start, whole, whole_end, end = 0, 0, queries, queries
    column_first, column_end = columns * 0, columns * 0 + queries
    if MASK == "causal":
        offset = keys - queries
        column_first = columns - offset
        start = tl.maximum(block * COLUMNS - offset, 0) // ROWS * ROWS
        whole = tl.maximum(block * COLUMNS + COLUMNS - 1 - offset, 0)
        whole = tl.minimum((whole + ROWS - 1) // ROWS * ROWS, queries)
    if MASK == "spans":
        spans += b * spans_step
        column_first, column_end = ends(spans, columns, keys)
        start, whole, whole_end, end = stretches(spans, block * COLUMNS, keys, COLUMNS, ROWS)
    for member in range(group):
        n = g * group + member
        q_head, dout_head = q + b * q_b + n * q_n, dout + b * dout_b + n * dout_n
        row_start = (b * heads + n) * queries
        if MASK != "full":
            dk_sums, dv_sums = keys_stretch(
                dk_sums, dv_sums, q_head, dout_head, k_tile, v_tile, logsumexp + row_start, delta + row_start,
                q_t, dout_t, column_first, column_end, queries, start, whole, scale, softcap,
                True, HEAD, WIDTH, MASK, IS_CAPPED, ROWS,
            )  # fmt: skip
        dk_sums, dv_sums = keys_stretch(
            dk_sums, dv_sums, q_head, dout_head, k_tile, v_tile, logsumexp + row_start, delta + row_start,
            q_t, dout_t, column_first, column_end, queries, whole, whole_end, scale, softcap,
            False, HEAD, WIDTH, MASK, IS_CAPPED, ROWS,
        )  # fmt: skip
        if MASK == "spans":
            dk_sums, dv_sums = keys_stretch(
                dk_sums, dv_sums, q_head, dout_head, k_tile, v_tile, logsumexp + row_start, delta + row_start,
                q_t, dout_t, column_first, column_end, queries, whole_end, end, scale, softcap,
                True, HEAD, WIDTH, MASK, IS_CAPPED, ROWS,
            )  # fmt: skip

    is_key = exists(columns < keys, HEAD, WIDTH)
    dk_places = places(dk + b * dk_b + g * dk_n, block * COLUMNS, dk_t, WIDTH, COLUMNS)
    dv_places = places(dv + b * dv_b + g * dv_n, block * COLUMNS, dv_t, WIDTH, COLUMNS)
    tl.store(dk_places, (dk_sums * scale).to(dk.dtype.element_ty), mask=is_key)
    tl.store(dv_places, dv_sums.to(dv.dtype.element_ty), mask=is_key)


@triton.jit
def keys_stretch(
    dk_sums, dv_sums, q, dout, k_tile, v_tile, logsumexp, delta, q_t, dout_t, column_first, column_end,
    queries, start, end, scale, softcap,
    IS_MASKED: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr,
    IS_CAPPED: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Add the queries from `start` to `end` to (dk_sums, dv_sums), and return them.

    Beyond the last query dout and q are zeros, so they add nothing.
    """
    for first in range(start, end, ROWS):
        rows = first + tl.arange(0, ROWS)
        q_tile = load(q, first, q_t, queries, True, HEAD, WIDTH, ROWS)
        row_log, row_delta = row_values(logsumexp, delta, rows, queries)
        # Transposed, [columns, rows], as the products below need them.
        scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
        tanhs = tanh(scores * (scale / softcap)) if IS_CAPPED else scores
        factor = (softcap if IS_CAPPED else scale) * LOG2E
        weights = tl.exp2(tanhs * factor - row_log[None, :])
        if IS_MASKED:
            seen = rows[None, :] >= column_first[:, None]
            if MASK == "spans":
                seen = seen & (rows[None, :] < column_end[:, None])
            weights = tl.where(seen, weights, 0.0)
        dout_tile = load(dout, first, dout_t, queries, True, HEAD, WIDTH, ROWS)
        dv_sums = tl.dot(weights.to(dout_tile.dtype), dout_tile, dv_sums, input_precision="ieee")
        dweights = tl.dot(v_tile, tl.trans(dout_tile), input_precision="ieee")
        dscores = gradient_of_scores(weights, dweights, row_delta[None, :], tanhs, IS_CAPPED)
        dk_sums = tl.dot(dscores.to(q_tile.dtype), q_tile, dk_sums, input_precision="ieee")
    return dk_sums, dv_sums


@triton.jit
def row_values(logsumexp, delta, rows, queries):
    """The logsumexp, base 2, and delta of these queries."""
    is_row = rows < queries
    row_log = tl.load(logsumexp + rows, mask=is_row, other=0.0) * LOG2E
    return row_log, tl.load(delta + rows, mask=is_row, other=0.0)


@tuned(BACKWARD_QUERIES)
def flash_backward_queries(
    q, k, v, dout,  # pointers to [B, N, Tq, D], [B, G, Tk, D], [B, G, Tk, D], [B, N, Tq, D]
    logsumexp, delta,  # pointers to [B, N, Tq] fp32
    spans,  # pointer to [B, 2, Tq] int32, or None
    dq,  # pointer to [B, N, Tq, D]
    q_b, q_n, q_t, k_b, k_n, k_t, v_b, v_n, v_t, dout_b, dout_n, dout_t, dq_b, dq_n, dq_t,
    spans_step, heads, group, queries, keys, scale, softcap, queries_class, keys_class,
    HEAD: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr, IS_CAPPED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0) if MASK == "causal" else tl.program_id(0)
    b, n = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    rows = block * ROWS + tl.arange(0, ROWS)
    q_tile = load(q + b * q_b + n * q_n, block * ROWS, q_t, queries, True, HEAD, WIDTH, ROWS)
    dout_tile = load(dout + b * dout_b + n * dout_n, block * ROWS, dout_t, queries, True, HEAD, WIDTH, ROWS)
    row_start = (b * heads + n) * queries
    row_log, row_delta = row_values(logsumexp + row_start, delta + row_start, rows, queries)
    k_head, v_head = k + b * k_b + n // group * k_n, v + b * v_b + n // group * v_n

    sums = tl.zeros((ROWS, WIDTH), tl.float32)
    if MASK == "spans":
        spans += b * spans_step
        row_first, row_end = ends(spans, rows, queries)
        start, whole, whole_end, end = stretches(spans, block * ROWS, queries, ROWS, COLUMNS)
        sums = queries_stretch(
            sums, q_tile, dout_tile, k_head, v_head, k_t, v_t, row_log, row_delta, row_first, row_end, keys,
            start, whole, scale, softcap, True, HEAD, WIDTH, MASK, IS_CAPPED, COLUMNS,
        )  # fmt: skip
    else:
        whole = 0
        row_first, row_end, whole_end, end = keys_of(block, rows, queries, keys, MASK, ROWS, COLUMNS)
    sums = queries_stretch(
        sums, q_tile, dout_tile, k_head, v_head, k_t, v_t, row_log, row_delta, row_first, row_end, keys,
        whole, whole_end, scale, softcap, False, HEAD, WIDTH, MASK, IS_CAPPED, COLUMNS,
    )  # fmt: skip
    sums = queries_stretch(
        sums, q_tile, dout_tile, k_head, v_head, k_t, v_t, row_log, row_delta, row_first, row_end, keys,
        whole_end, end, scale, softcap, True, HEAD, WIDTH, MASK, IS_CAPPED, COLUMNS,
    )  # fmt: skip
    pointers = places(dq + b * dq_b + n * dq_n, block * ROWS, dq_t, WIDTH, ROWS)
    tl.store(pointers, (sums * scale).to(dq.dtype.element_ty), mask=exists(rows < queries, HEAD, WIDTH))


@triton.jit
def queries_stretch(
    sums, q_tile, dout_tile, k, v, k_t, v_t, row_log, row_delta, row_first, row_end, keys, start, end,
    scale, softcap,
    IS_MASKED: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, MASK: tl.constexpr,
    IS_CAPPED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add the keys from `start` to `end` to the sums of dq, and return them."""
    STAGES: tl.constexpr = 1 if IS_MASKED and MASK == "full" else None  # [Note: one block at most]
    for first in tl.range(start, end, COLUMNS, num_stages=STAGES):
        columns = first + tl.arange(0, COLUMNS)
        k_tile = load(k, first, k_t, keys, IS_MASKED, HEAD, WIDTH, COLUMNS)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        tanhs = tanh(scores * (scale / softcap)) if IS_CAPPED else scores
        factor = (softcap if IS_CAPPED else scale) * LOG2E
        weights = tl.exp2(tanhs * factor - row_log[:, None])
        if IS_MASKED:
            weights = tl.where(is_seen(columns, row_first, row_end, MASK), weights, 0.0)
        v_tile = load(v, first, v_t, keys, IS_MASKED, HEAD, WIDTH, COLUMNS)
        dweights = tl.dot(dout_tile, tl.trans(v_tile), input_precision="ieee")
        dscores = gradient_of_scores(weights, dweights, row_delta[:, None], tanhs, IS_CAPPED)
        sums = tl.dot(dscores.to(k_tile.dtype), k_tile, sums, input_precision="ieee")
    return sums
