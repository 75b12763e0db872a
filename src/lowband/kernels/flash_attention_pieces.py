"""What FlashAttention-2's forward and backward share on a GPU: loads, and which keys or queries are visited.

[Note: base 2] The GPU's exponential is 2^x. Scores are scaled by s log2(e), so that P = 2^(S' - L'), and the
logsumexp is converted back to base e when it is stored.

[Note: stretches] With a causal mask the keys of a block of queries form three stretches: keys that all
queries see, without a mask; the diagonal, with a mask; and keys that no query sees, which are not read. For a
block of keys the queries form the same stretches in reverse. A block that passes the last key is masked too.
Spans have a masked stretch on both sides.

[Note: one block at most] Without a mask the masked stretch is the keys after the last whole block: one block
or none. Pipelined like the others, it made ptxas wait after every matrix product of the kernel on sm_90
(`serialized` in compiled.csv), so it is not pipelined.

[Note: width] A head is WIDTH wide on the chip, a power of two: values beyond HEAD are zeros.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def places(head, first, stride, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Pointers [SIZE, WIDTH] to one head's positions from `first` on; only the offsets are 32 bits wide."""
    offsets = tl.arange(0, SIZE)[:, None] * stride + tl.arange(0, WIDTH)[None, :]
    return head + first * tl.cast(stride, tl.int64) + offsets


@triton.jit
def exists(is_position, HEAD: tl.constexpr, WIDTH: tl.constexpr):
    """Which values there are of these positions: [SIZE, 1], or [SIZE, WIDTH] where a head is not as wide."""
    there = is_position[:, None]
    if HEAD < WIDTH:
        there = there & (tl.arange(0, WIDTH) < HEAD)[None, :]
    return there


@triton.jit
def load(
    head, first, stride, count,
    IS_MASKED: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The values [SIZE, WIDTH] of one head's positions from `first` on; zeros from position `count` on."""
    pointers = places(head, first, stride, WIDTH, SIZE)
    if IS_MASKED or HEAD < WIDTH:
        is_position = first + tl.arange(0, SIZE) < count
        values = tl.load(pointers, mask=exists(is_position, HEAD, WIDTH), other=0.0)
    else:
        values = tl.load(pointers)
    return values


@triton.jit
def ends(spans, positions, count):
    """Both ends of the spans of these positions; positions from `count` on have empty ones."""
    there = positions < count
    return tl.load(spans + positions, mask=there, other=0), tl.load(
        spans + count + positions, mask=there, other=0
    )


@triton.jit
def stretches(spans, first, count, SIZE: tl.constexpr, STEP: tl.constexpr):
    """What SIZE positions from `first` on visit: borders of a masked, a whole and a masked stretch.

    What all of them see is whole, in steps of STEP.
    """
    last = tl.minimum(first + SIZE, count) - 1
    start, start_of_last = tl.load(spans + first), tl.load(spans + last)
    end_of_first, end = tl.load(spans + count + first), tl.load(spans + count + last)
    whole = tl.minimum(start + (start_of_last - start + STEP - 1) // STEP * STEP, end)
    return start, whole, whole + tl.maximum(end_of_first - whole, 0) // STEP * STEP, end


@triton.jit
def tanh(x):
    return 1 - 2 / (1 + tl.exp2(x * (2 * LOG2E)))
