"""What attention between ranks along context computes and holds in memory, in closed form.

Of n parts of a sequence, G of which a rank gathers in each of the R = n / G steps of its ring. One unit is a
part's queries with a part's keys; under a causal mask a rank sees n / 2 of them in the mean. The rank that
has most sees, step by step,

    zigzag       G / 2  in each                 n / 2 in all, as every rank
    contiguous   G - 1 / 2, then G in each      n - 1 / 2 in all: the mean is n / (2 n - 1) of it

and where masked pairs are computed, too, its diagonals are whole: 1 / 4 more of a unit in the first step
(zigzag), 1 / 2 (contiguous), instead of n in all on one part.

Of each token a rank keeps, from forward to backward, the output twice (as attention has it, and in the order
of the product behind it), and keys that were repeated for ranks of heads. In a block's backward it holds,
with q elements of queries and k of keys a token (cost/context.py), w bytes a value and 4 of a sum:

    w      keys and values 2 k, the ones that are coming 2 k (ring), those gathered 2 k G (gather);
           of one step the output's gradient q, and gradients q + 2 k G and, in one piece, 2 k G
    4      of gradients: the queries' q, those that travel 2 k and those that arrive 2 k (ring), the block's
           2 k G, and what is reduced, by parts and in the order of their places, 4 k G (gather)

Source: ring attention (arXiv 2310.01889); the load without balance as ring-flash-attention describes it.
"""

from fractions import Fraction

from lowband.cost.context import elements
from lowband.cost.memory import GRAD_BYTES
from lowband.spec.context import Layout
from lowband.spec.model import ModelSpec
from lowband.spec.wire import DTYPE_BYTES


def attended(layout: Layout, masked_too: bool = False) -> list[Fraction]:
    """By step of the ring, attention of the rank that has most: 1 is that of the mean rank in all steps.

    masked_too: whether pairs that the mask hides are computed; then 1 is all pairs of a rank's queries
    """
    parts, gathered = layout.parts, layout.ranks("gather")
    if parts == 1:
        return [Fraction(1)]
    first, others = Fraction(gathered, 2), Fraction(gathered, 2)
    if not layout.zigzag:
        first, others = gathered - Fraction(1, 2), Fraction(gathered)
    if masked_too:
        first += Fraction(1, 4) if layout.zigzag else Fraction(1, 2)
    one = Fraction(parts) if masked_too else Fraction(parts, 2)
    return [first / one, *[others / one] * (layout.ranks("ring") - 1)]


def merges(layout: Layout) -> int:
    """Blocks of keys whose outputs a rank adds up, in a forward; 0 where one block has all of them."""
    return 0 if layout.parts == 1 else layout.ranks("ring")


def kept_more(model: ModelSpec, tensor: int, layout: Layout, dtype: str) -> float:
    """Bytes per token that a block keeps besides those of `cost.activations`; 0 on one rank."""
    if layout.levels.world == 1:
        return 0.0
    queries, keys = elements(model, tensor, layout)
    return float(DTYPE_BYTES[dtype] * (queries + 2 * (keys - Fraction(model.kv_hidden, tensor))))


def held_more(model: ModelSpec, tensor: int, layout: Layout, dtype: str) -> float:
    """Bytes per token in the backward of a block's attention, beside activations; 0 on one rank."""
    if layout.levels.world == 1:
        return 0.0
    queries, keys = elements(model, tensor, layout)
    gathered, in_ring = layout.ranks("gather"), layout.ranks("ring") > 1
    block, here = 2 * keys * gathered, 2 * keys * (2 if in_ring else 1)
    again = block if gathered > 1 else 0
    sums = max(GRAD_BYTES, DTYPE_BYTES[dtype])
    return float(
        DTYPE_BYTES[dtype] * (here + again + 2 * queries + 2 * block)
        + sums * (queries + here + block + 2 * again)
    )
