"""Bytes that a rank sends in a step along context, in closed form.

X are a rank's activations, sequences x its tokens x hidden, and k its keys, as many. Of H ranks of heads, G
that gather and R in a ring, per layer of softmax and micro-batch, in the compute dtype:

    heads      4 X (H - 1) / H forward (queries, keys, values; outputs), the same backward
    gather     2 k (G - 1) R forward, the same again backward, and as much for gradients, in fp32
    ring       2 k (R - 1) forward, the same again backward, and 2 k R for gradients, in fp32

A block that is recomputed runs its forward's exchanges again. With each micro-batch's loss every rank along
data sends the number of its tokens to all others.

Source: DeepSpeed Ulysses (arXiv 2309.14509), Llama 3 (arXiv 2407.21783), ring attention (arXiv 2310.01889).
"""

from collections import defaultdict
from collections.abc import Iterator
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
from lowband.spec.mesh import SELF, WORLD, Levels
from lowband.spec.records import mean
from lowband.spec.run import RunSpec
from lowband.spec.step import Collective
from lowband.spec.wire import DTYPE_BYTES

COUNT_BYTES = 8  # of the number of tokens that count


def context_bytes(spec: RunSpec) -> dict[tuple[str, str, str], int | float]:
    """Bytes sent per rank in one optimizer step along context: (level, collective, wire) -> bytes, the mean
    over ranks."""
    counts: defaultdict[tuple[str, str, str], Fraction] = defaultdict(Fraction)
    if spec.context == 1:
        return {}

    def add(row: Collective, level: str, sent: Fraction, times: int) -> None:
        if sent * times:
            counts[level, row.name, "native"] += sent * times * spec.accumulation

    layout, width = spec.layout, DTYPE_BYTES[spec.compute_dtype]
    elements = spec.micro_batch * spec.seq_len // spec.context * spec.model.hidden // spec.tensor
    gathered, around = layout.ranks("gather"), layout.ranks("ring")
    layers = spec.model.layers - spec.model.linear_layers
    runs = 2 * layers if spec.recompute == "full" else layers  # of a block's forward
    for hop in layout.levels.hops(*layout.span("heads")):
        sent = Fraction(4 * elements * width * (hop.count - 1), hop.count)
        add(CONTEXT_HEADS, hop.level, sent, runs)
        add(CONTEXT_HEADS_GRAD, hop.level, sent, layers)
    of_rows = ((CONTEXT_GATHER, width, runs), (CONTEXT_GATHER_AGAIN, width, layers))
    for row, each, times in (*of_rows, (CONTEXT_SCATTER, MASTER_BYTES, layers)):
        whole = Fraction(2 * elements * each * gathered)
        for level, sent in by_level(row, whole, layout.levels, *layout.span("gather")):
            add(row, level, sent, times * around)
    ring = layout.levels.ring(*layout.span("ring"))
    for level, share in () if ring is None else ring.shares(None).items():
        add(CONTEXT_RING, level, share * 2 * elements * width, runs * (around - 1))
        add(CONTEXT_RING_AGAIN, level, share * 2 * elements * width, layers * (around - 1))
        add(CONTEXT_RING_GRAD, level, share * 2 * elements * MASTER_BYTES, layers * around)
    for level, sent in by_level(TOKENS_COUNT, Fraction(COUNT_BYTES * spec.levels.world), spec.levels):
        add(TOKENS_COUNT, level, sent, 1)
    return {key: mean(sent.numerator, sent.denominator) for key, sent in counts.items()}


def by_level(
    row: Collective, whole: Fraction, levels: Levels, inner: str = SELF, outer: str = WORLD
) -> Iterator[tuple[str, Fraction]]:
    """What a rank sends over each level, of a row that gathers or reduces `whole` bytes between two."""
    ways = 2 if row.kind == "all_reduce" else 1
    for hop in levels.hops(inner, outer):
        whole /= hop.count
        yield hop.level, ways * (hop.count - 1) * whole
