"""Bytes sent per rank and optimizer step, by level, collective and wire, in closed form.

A hop joins n partners. In a gather each partner sends n - 1 times its buffer from before the hop; in a
reduce-scatter it sends n - 1 of the n parts of its buffer. A collective over several levels is a chain of
hops whose buffers shrink outwards by n at each level. On a quantized wire a message is codes and scales,
rounded up to 16 bytes. A swap is one message. A copy between tiers is the rank's own shard, once a step,
whatever the accumulation: its level is the tier. A disk's is of all states, from it and back, with Adam, and
so is that of units which are updated on the device. Of weights beyond the device it is the shard before each
gather but those of new weights, which are stashed.

A flat ring over n ranks sends as much as all hops together: n - 1 times the smallest shard. A rank sends it
all to its successor, so the level depends on the rank. With n1 partners inside, then n2, ..., the part of the
ranks whose successor is across level i is 1 / (n1 ... n(i-1)) - 1 / (n1 ... ni), plus 1 / n at the outermost.

Joined hops over n ranks send as much too, and as much to each of n - 1 partners. Of those, n1 ... n(i-1)
(ni - 1) are across level i: so most bytes cross the outermost level, which hops spare.

Source: the ring and pairwise-exchange volumes of Thakur, Rabenseifner and Gropp (2005), sections 4.1 and 4.3;
ZeRO++ (arXiv 2306.10209), sections 3.1 and 3.3, for one quantization per gather and one per reduction hop.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from itertools import groupby

from lowband.cost.memory import STATE_BYTES
from lowband.cost.weights_copies import weights_copies
from lowband.spec.axes import ONLY_DATA, Axes
from lowband.spec.mesh import SELF, Hop, Joined, Levels, Ring
from lowband.spec.model import ModelSpec
from lowband.spec.partition import UnitLayout
from lowband.spec.records import mean
from lowband.spec.scheme import Scheme
from lowband.spec.step import (
    BACKWARD_GATHER,
    FORWARD_GATHER,
    NORM_GATHER,
    Collective,
    Kind,
    Order,
    Pattern,
    passes,
    pattern_of,
)
from lowband.spec.tensor import cut_shape, gpt_plan
from lowband.spec.tiers import DISK, HOST
from lowband.spec.wire import DTYPE_BYTES, WIRE_BITS, Wire, is_plain, message_bytes

NORM_BYTES = 8  # squares are summed in fp64


def unit_numels(model: ModelSpec, levels: Levels, axes: Axes = ONLY_DATA) -> list[int]:
    """Elements per unit, padding included: the root's, then each block's, of two kinds the mean block's.

    levels: levels of the ranks that share a part of the model
    axes:   layers are cut along tensor as spec.tensor says, blocks along pipeline: there the units are those
            of the first stage, which has the embeddings and keeps the most activations. Experts that ranks
            divide are units of their own: `expert_numels`
    """
    return list(stage_numels(model, levels, axes))


def stage_numels(model: ModelSpec, levels: Levels, axes: Axes = ONLY_DATA) -> tuple[int, ...]:
    """`unit_numels`, cached: a search calls it with the same arguments again and again."""
    of = levels.world, axes.tensor, axes.expert, axes.pipeline, axes.has_both_ends
    return _unit_numels(model, *of)


@cache
def _unit_numels(
    model: ModelSpec, ranks: int, tensor: int, expert: int, pipeline: int, has_both_ends: bool
) -> tuple[int, ...]:
    """By all that they depend on. ranks: that share a part of the model"""
    plan, apart = gpt_plan(model), experts_apart(model, expert)

    def numel(shapes: Mapping[str, tuple[int, ...]]) -> int:
        parts = [cut_shape(name, shape, plan, tensor) for name, shape in shapes.items()]
        return UnitLayout.of(parts, ranks).numel

    head = () if has_both_ends else ("head.weight", "final_norm.weight", "final_norm.bias")
    root = numel({name: shape for name, shape in model.root_shapes().items() if name not in head})
    dense, block = (
        numel({name: shape for name, shape in model.block_shapes(kind).items() if name not in apart})
        for kind in (True, False)
    )
    mean = block + (dense - block) * model.dense_layers // model.layers
    return root, *[mean] * (model.layers // pipeline)


def experts_apart(model: ModelSpec, expert: int) -> dict[str, tuple[int, ...]]:
    """A block's parameters of which ranks along expert have parts, and the shapes of these."""
    if expert == 1:
        return {}
    parts = ((name, shape) for name, shape in model.expert_shapes().items() if ".experts." in name)
    return {name: (shape[0] // expert, *shape[1:]) for name, shape in parts}


def expert_numels(model: ModelSpec, alike: Levels, expert: int) -> list[int]:
    """As `unit_numels`, of a rank's experts. alike: levels of the ranks that have the same ones"""
    parts = experts_apart(model, expert).values()
    if not parts:
        return [0] * (model.layers + 1)
    numel, routed = UnitLayout.of([*parts], alike.world).numel, model.layers - model.dense_layers
    return [0, *[numel * routed // model.layers] * model.layers]


def cut_shapes(model: ModelSpec, tensor: int, without: Collection[str] = ()) -> list[list[tuple[int, ...]]]:
    """`model.unit_shapes(without)` on a tensor rank."""
    plan = gpt_plan(model)
    root, block = (
        [cut_shape(name, shape, plan, tensor) for name, shape in shapes.items() if name not in without]
        for shapes in (model.root_shapes(), model.block_shapes())
    )
    return [root, *[block] * model.layers]


@dataclass(frozen=True)
class Transfer:
    """One hop of one unit's collective, as one rank sees it.

    sent_bytes:       bytes that the rank sends to its hop.count - 1 partners together
    quantized_values: values that the rank encodes and decodes around the hop
    """

    collective: Collective
    hop: Hop
    wire: Wire
    sent_bytes: int
    quantized_values: int


def sent_bytes(
    units: Sequence[int],
    scheme: Scheme,
    levels: Levels,
    compute_dtype: str,
    reduce_dtype: str,
    accumulation: int,
    is_clipped: bool,
    pattern: Pattern = "hops",
    rank: int | None = None,
    order: Order = "depth",
    gathers: Sequence[tuple[int, int]] = (),
) -> dict[tuple[str, str, str], int | float]:
    """Bytes sent per rank in one optimizer step: (level, collective, wire) -> bytes.

    units: elements per unit, padding included, the root's first
    accumulation, order: micro-batches per step, and the order in which units compute them
    is_clipped: whether gradients are clipped by their global norm: a replica's ranks gather all squares
    gathers:    by unit, how often a step gathers it forward, and backward; default: as the order says
    rank:       the bytes of this rank; None: the mean over ranks, which differs from a rank's in a flat ring
    A step includes the gather of the weights that the previous step updated. Of an exchange between replicas,
    every H steps, it has the H-th part: bytes are the mean over a period.
    """
    counts: defaultdict[tuple[str, str, str], int | Fraction] = defaultdict(int)

    def add(
        name: str, kind: Kind, wire: Wire, by_hop: Sequence[tuple[Hop, int]], times: int | Fraction
    ) -> None:
        for level, sent in _by_level(by_hop, pattern_of(pattern, kind, wire == "native"), rank):
            counts[level, name, wire] += sent * times

    for unit, numel in enumerate(units):
        hops = transfers(numel, unit == 0, scheme, levels, compute_dtype, reduce_dtype)
        for row, ours in groupby(hops, key=lambda t: t.collective):
            found = list(ours)
            by_hop = [(t.hop, t.sent_bytes) for t in found]
            often = times(row, scheme, accumulation, order)
            if gathers and row in (FORWARD_GATHER, BACKWARD_GATHER):
                often = gathers[unit][row is BACKWARD_GATHER]
            add(row.name, row.kind, found[0].wire, by_hop, often)
    for tier, name, sent in _of_optimizer(units, scheme, levels, compute_dtype, reduce_dtype):
        counts[tier, name, "native"] += sent
    often_of = gathers or [(passes(accumulation, order),) * 2] * len(units)
    for tier, name, sent in weights_copies(units, scheme, levels, compute_dtype, often_of):
        counts[tier, name, "native"] += sent
    if is_clipped:
        held, by_hop = NORM_BYTES, []
        for hop in reversed(levels.hops(SELF, scheme.level("replica"))):
            by_hop.append((hop, (hop.count - 1) * held))
            held *= hop.count
        add(NORM_GATHER, "gather", "native", by_hop, 1)
    return {key: mean(sent.numerator, sent.denominator) for key, sent in counts.items()}


def _of_optimizer(
    units: Sequence[int], scheme: Scheme, levels: Levels, compute_dtype: str, reduce_dtype: str
) -> Iterator[tuple[str, str, int]]:
    """Tier, row and bytes of what the optimizer's states send to and fro in a step."""
    for placed, numels in scheme.parts(units) if scheme.copies else ():
        shards = sum(numels) // levels.size(scheme.optim)
        for row in placed.copies:
            if not placed.is_moved:
                yield HOST, row.name, shards * DTYPE_BYTES[row.dtype(compute_dtype, reduce_dtype)]
            if placed.is_moved or placed.optim_tier == DISK:
                yield placed.optim_tier, row.name, shards * STATE_BYTES


def times(row: Collective, scheme: Scheme, accumulation: int, order: Order) -> int | Fraction:
    """How often a unit runs a row in a step; less than once for exchanges every H steps."""
    if row.every == "sync":
        return Fraction(1, scheme.period)
    return passes(accumulation, order) if row.every == "pass" else 1


def _by_level(
    by_hop: Sequence[tuple[Hop, int]], pattern: Pattern, rank: int | None
) -> Iterator[tuple[str, int | Fraction]]:
    """The bytes of one collective by level, given those of its hops."""
    if pattern == "hops":
        yield from ((hop.level, sent) for hop, sent in by_hop)
    elif by_hop:
        kind = Ring if pattern == "flat" else Joined
        hops = kind(tuple(sorted({hop for hop, _ in by_hop}, key=lambda hop: hop.stride)))
        total = sum(sent for _, sent in by_hop)
        yield from ((level, total * share) for level, share in hops.shares(rank).items())


@cache
def transfers(
    numel: int, is_root: bool, scheme: Scheme, levels: Levels, compute_dtype: str, reduce_dtype: str
) -> tuple[Transfer, ...]:
    """Every hop of one unit's collectives in a step, in order; cached, as `stage_numels` is.

    numel: elements of the unit, padding included
    The root stays gathered from forward to backward, so it is not gathered again.
    """
    unit = _UnitTraffic(scheme, levels, numel)
    hops: list[Transfer] = []
    for row in scheme.rows:
        if is_root and not row.of_root:
            continue
        dtype = row.dtype(compute_dtype, reduce_dtype)
        if row.kind == "swap":
            hops += unit.swap(row, dtype)
            continue
        if row.kind != "gather":
            hops += unit.reduce(row, dtype)
        if row.kind != "reduce":
            hops += unit.gather(row, dtype)
    return tuple(hops)


class _UnitTraffic:
    """One unit's collectives."""

    def __init__(self, scheme: Scheme, levels: Levels, numel: int) -> None:
        self._scheme, self._levels, self._numel = scheme, levels, numel

    def gather(self, row: Collective, dtype: str) -> Iterator[Transfer]:
        """Gather, outermost hop first; the owner encodes before the first hop, all decode after the last."""
        wire, (inner, outer) = self._wire(row, dtype), self._scheme.span(row)
        values = self._numel // self._levels.size(outer)
        held = self._message(values, wire, dtype)
        hops = list(reversed(self._levels.hops(inner, outer)))
        for i, hop in enumerate(hops):
            touched = values if i == 0 else 0
            touched += self._numel // self._levels.size(inner) if i == len(hops) - 1 else 0
            quantized = touched if wire in WIRE_BITS else 0
            yield Transfer(row, hop, wire, (hop.count - 1) * held, quantized)
            held *= hop.count

    def reduce(self, row: Collective, dtype: str) -> Iterator[Transfer]:
        """Reduce, innermost hop first; each hop encodes its messages and decodes those it receives."""
        wire, (inner, outer) = self._wire(row, dtype), self._scheme.span(row)
        numel = self._numel // self._levels.size(inner)
        for hop in self._levels.hops(inner, outer):
            quantized = 2 * numel if wire in WIRE_BITS else 0
            numel //= hop.count
            sent = (hop.count - 1) * self._message(numel, wire, dtype)
            yield Transfer(row, hop, wire, sent, quantized)

    def swap(self, row: Collective, dtype: str) -> Iterator[Transfer]:
        """One message to one of a level's partners."""
        wire, (inner, outer) = self._wire(row, dtype), self._scheme.span(row)
        numel = self._numel // self._levels.size(inner)
        for hop in self._levels.hops(inner, outer):
            quantized = 2 * numel if wire in WIRE_BITS else 0
            yield Transfer(row, replace(hop, count=2), wire, self._message(numel, wire, dtype), quantized)

    def _wire(self, row: Collective, dtype: str) -> Wire:
        wire = self._scheme.wire(row.name)
        return "native" if is_plain(wire, dtype) else wire

    def _message(self, numel: int, wire: Wire, dtype: str) -> int:
        return message_bytes(numel, wire, dtype, self._scheme.block_size)
