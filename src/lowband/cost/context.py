"""Bytes that a rank sends in a step along context, in closed form.

q are the elements of a rank's queries, its tokens x hidden, and k those of its keys: of its heads of keys, or
repeated where ranks of heads are more. Of H ranks of heads, G that gather and R in a ring, per layer of
softmax and micro-batch, in the compute dtype:

    heads      (2 q + 2 k) (H - 1) / H forward (queries, keys, values; outputs), the same backward
    gather     2 k (G - 1) R forward, the same again backward, and as much for gradients, in fp32
    ring       2 k (R - 1) forward, the same again backward, and 2 k R for gradients, in fp32

A block that is recomputed runs its forward's exchanges again. With each micro-batch's loss every rank along
data sends the number of its tokens to all others.

Source: DeepSpeed Ulysses (arXiv 2309.14509), Llama 3 (arXiv 2407.21783), ring attention (arXiv 2310.01889).
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

from lowband.cost.memory import MASTER_BYTES
from lowband.spec.activations import (
    CONTEXT_GATHER,
    CONTEXT_GATHER_AGAIN,
    CONTEXT_HEADS,
    CONTEXT_HEADS_GRAD,
    CONTEXT_RING,
    CONTEXT_RING_AGAIN,
    CONTEXT_RING_GRAD,
    CONTEXT_SCATTER,
    TOKENS_COUNT,
)
from lowband.spec.context import Layout
from lowband.spec.mesh import SELF, WORLD, Hop, Levels
from lowband.spec.model import ModelSpec
from lowband.spec.records import mean
from lowband.spec.run import RunSpec
from lowband.spec.step import Collective
from lowband.spec.wire import DTYPE_BYTES

COUNT_BYTES = 8  # of the number of tokens that count
SWAPS = 4  # all-to-alls of a pass: queries, keys, values; outputs


@dataclass(frozen=True)
class Part:
    """What a row sends over one level's links in one pass of a block.

    hop:   its partners; of a ring, the ranks that are neighbours there
    times: how many exchanges that is, one after the other; of a ring, on all its levels together
    bytes: in all of them, for each token of a rank; of a ring, the mean over its ranks
    """

    row: Collective
    hop: Hop
    times: int
    bytes: Fraction


def elements(model: ModelSpec, tensor: int, layout: Layout) -> tuple[Fraction, Fraction]:
    """Elements per token of a rank's queries, and of its keys: repeated where ranks of heads are more."""
    heads, size = layout.ranks("heads"), model.head_size
    keys = Fraction(model.kv_hidden, tensor)
    return Fraction(model.query_hidden + model.out_hidden, 2 * tensor), max(
        keys, Fraction(size * heads)
    ) if heads > 1 else keys


def parts(model: ModelSpec, tensor: int, layout: Layout, compute_dtype: str) -> Iterator[Part]:
    """What every row of a block's attention sends in its pass, forward or backward, of one micro-batch."""
    width = DTYPE_BYTES[compute_dtype]
    queries, keys = elements(model, tensor, layout)
    gathered, around = layout.ranks("gather"), layout.ranks("ring")
    for hop in layout.levels.hops(*layout.span("heads")):
        sent = (2 * queries + 2 * keys) * width * Fraction(hop.count - 1, hop.count)
        for row in (CONTEXT_HEADS, CONTEXT_HEADS_GRAD):
            yield Part(row, hop, SWAPS, sent)
    in_fp32 = max(width, MASTER_BYTES)
    for row, each in ((CONTEXT_GATHER, width), (CONTEXT_GATHER_AGAIN, width), (CONTEXT_SCATTER, in_fp32)):
        for hop, sent in by_hop(row, 2 * keys * each * gathered, layout.levels, *layout.span("gather")):
            yield Part(row, hop, around, sent * around)
    ring = layout.levels.ring(*layout.span("ring"))
    if ring is None:
        return
    for row, times, each in (
        (CONTEXT_RING, around - 1, width),
        (CONTEXT_RING_AGAIN, around - 1, width),
        (CONTEXT_RING_GRAD, around, in_fp32),
    ):
        for hop in ring.hops:
            yield Part(row, hop, times, ring.shares(None)[hop.level] * 2 * keys * each * times)


def passes(row: Collective, is_recomputed: bool) -> int:
    """How often a micro-batch runs a row of a block: a recomputed forward exchanges again."""
    return 2 if is_recomputed and row.during == "forward" else 1


def context_bytes(spec: RunSpec) -> dict[tuple[str, str, str], int | float]:
    """Bytes sent per rank in one optimizer step along context: (level, collective, wire) -> bytes, the mean
    over ranks."""
    if spec.context == 1:
        return {}
    tokens = spec.micro_batch * spec.seq_len // spec.context
    return sent_along_context(
        spec.model, spec.layout, spec.levels, spec.tensor, tokens, spec.accumulation,
        spec.recompute == "full", spec.compute_dtype, spec.scheme.level("replica"),
    )  # fmt: skip


def sent_along_context(
    model: ModelSpec,
    layout: Layout,
    levels: Levels,
    tensor: int,
    tokens: int,
    accumulation: int,
    is_recomputed: bool,
    compute_dtype: str,
    averaged: str,
) -> dict[tuple[str, str, str], int | float]:
    """The same by its terms.

    levels:   as the ranks along data see them
    tokens:   of a rank and micro-batch
    averaged: the level over which gradients are averaged in every step
    """
    counts: defaultdict[tuple[str, str, str], Fraction] = defaultdict(Fraction)
    for part in parts(model, tensor, layout, compute_dtype):
        times = accumulation * (model.layers - model.linear_layers) * passes(part.row, is_recomputed)
        counts[part.hop.level, part.row.name, "native"] += part.bytes * tokens * times
    for hop, sent in counts_of_tokens(levels, averaged):
        counts[hop.level, TOKENS_COUNT.name, "native"] += sent * accumulation
    return {key: mean(sent.numerator, sent.denominator) for key, sent in counts.items() if sent}


def counts_of_tokens(levels: Levels, averaged: str) -> Iterator[tuple[Hop, Fraction]]:
    """What a rank sends for the mean of a micro-batch's losses. averaged: as above"""
    return by_hop(TOKENS_COUNT, Fraction(COUNT_BYTES * levels.size(averaged)), levels, SELF, averaged)


def by_level(
    row: Collective, whole: Fraction, levels: Levels, inner: str = SELF, outer: str = WORLD
) -> Iterator[tuple[str, Fraction]]:
    """What a rank sends over each level, of a row that gathers or reduces `whole` bytes between two."""
    for hop, sent in by_hop(row, whole, levels, inner, outer):
        yield hop.level, sent


def by_hop(
    row: Collective, whole: Fraction, levels: Levels, inner: str = SELF, outer: str = WORLD
) -> Iterator[tuple[Hop, Fraction]]:
    """The same, with the hops that cross the levels."""
    ways = 2 if row.kind == "all_reduce" else 1
    for hop in levels.hops(inner, outer):
        whole /= hop.count
        yield hop, ways * (hop.count - 1) * whole
