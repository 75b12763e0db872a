"""Bytes that a rank sends in a step to and from experts of other ranks, in closed form.

Of a token, k of E experts are equally likely: what a run counts depends on what its tokens choose. P(m) is
the probability that some of them lie in one of m equal groups of experts. Per token and one way, over hops of
n partners each, from the outside, with m groups before a hop and m' = m n behind it:

    flat, hops   k (n - 1) / n rows (flat: between all ranks, by the levels that these cross)
    merged       (n - 1) m P(m') rows, of k pairs (n - 1) / n

Rows go out and come back, forward and backward, H values each. A pair's row and expert travel as int32, the
row only where rows are merged; there its weight does, too, and its gradient back. Where c experts have copies
in each of n groups of the outermost level, ranks send their weights c (n - 1) times in each forward, and as
much comes back; the tokens that then need not cross that level are not known before.

Source: counted in test_dispatch; for one level DeepEP's and HetuMoE's exchanges.
"""

from collections import defaultdict
from collections.abc import Iterator
from fractions import Fraction
from itertools import product
from math import comb, prod
from typing import NamedTuple

from lowband.cost.bytes import experts_apart
from lowband.cost.context import by_level
from lowband.cost.memory import MASTER_BYTES
from lowband.spec.activations import (
    EXPERT_COPIES,
    EXPERT_COPIES_GRAD,
    EXPERTS_LOAD,
    ROUTE_BACK,
    ROUTE_BACK_GRAD,
    ROUTE_COUNTS,
    ROUTE_OUT,
    ROUTE_OUT_GRAD,
    ROUTE_PAIRS,
    ROUTE_WEIGHTS,
    ROUTE_WEIGHTS_GRAD,
)
from lowband.spec.axes import Route
from lowband.spec.mesh import SELF, WORLD, Levels
from lowband.spec.partition import round_up
from lowband.spec.run import RunSpec
from lowband.spec.wire import DTYPE_BYTES

INDEX_BYTES, COUNT_BYTES, LOAD_BYTES = 4, 8, 8  # int32, int64, fp64


class Crossing(NamedTuple):
    """What a token sends over a level's links, one way, in the mean. messages: of a rank, for all tokens"""

    level: str
    rows: Fraction
    pairs: Fraction
    messages: Fraction


def crossings(levels: Levels, route: Route, experts: int, top_k: int) -> Iterator[Crossing]:
    """By level, outermost first. levels: as ranks with different experts see them"""
    hops = levels.hops(SELF, WORLD)[::-1]
    joined = levels.joined(SELF, WORLD)
    if route == "flat":
        others = levels.world - 1
        for level, share in {} if joined is None else joined.shares(None).items():
            pairs = Fraction(top_k * others, levels.world) * share
            yield Crossing(level, pairs, pairs, others * share)
        return
    groups = 1
    for hop in hops:
        pairs = Fraction(top_k * (hop.count - 1), hop.count)
        rows = pairs
        if route == "merged":
            rows = (hop.count - 1) * groups * hit(experts, top_k, groups * hop.count)
        yield Crossing(hop.level, rows, pairs, Fraction(hop.count - 1))
        groups *= hop.count


def hit(experts: int, top_k: int, groups: int) -> Fraction:
    """The probability that some of a token's experts are in one of so many groups."""
    return 1 - Fraction(comb(experts - experts // groups, top_k), comb(experts, top_k))


def experts_bytes(spec: RunSpec) -> dict[tuple[str, str, str], Fraction]:
    """(level, collective, wire) -> bytes that a rank sends in an optimizer step, in the mean; of a pipeline,
    over its ranks, too."""
    model, counts = spec.model, defaultdict[tuple[str, str, str], Fraction](Fraction)
    if model.experts is None:
        return {}
    layers = Fraction(model.layers, spec.pipeline)
    divided = spec.context * (spec.tensor if spec.sequence_parallel else 1)
    tokens = Fraction(spec.micro_batch * spec.seq_len, divided)
    forwards = spec.accumulation * (2 if spec.recompute == "full" else 1)
    width, merged = DTYPE_BYTES[spec.compute_dtype], spec.route == "merged"
    for each in crossings(spec.levels_of_experts, spec.route, model.experts, model.top_k):
        row = each.rows * model.hidden * width * tokens
        pair, columns = each.pairs * tokens, 2 if merged else 1
        per_forward = {
            ROUTE_OUT: row, ROUTE_BACK: row,
            ROUTE_PAIRS: pair * columns * INDEX_BYTES,
            ROUTE_COUNTS: each.messages * columns * COUNT_BYTES,
            **({ROUTE_WEIGHTS: pair * MASTER_BYTES} if merged else {}),
        }  # fmt: skip
        per_backward = {ROUTE_OUT_GRAD: row, ROUTE_BACK_GRAD: row}
        per_backward |= {ROUTE_WEIGHTS_GRAD: pair * MASTER_BYTES} if merged else {}
        for rows, times in ((per_forward, forwards), (per_backward, spec.accumulation)):
            for collective, sent in rows.items():
                counts[each.level, collective.name, "native"] += sent * times * layers
    for level, sent in _copies(spec):
        for collective, times in ((EXPERT_COPIES, forwards), (EXPERT_COPIES_GRAD, spec.accumulation)):
            counts[level, collective.name, "native"] += sent * times * layers
    axes = [spec.levels, *([spec.mesh.levels("tensor")] if spec.sequence_parallel else [])]
    for levels, of_place in product(axes, _layers(spec)):
        whole = LOAD_BYTES * round_up(of_place * model.experts, levels.world)
        for level, sent in by_level(EXPERTS_LOAD, Fraction(whole), levels):
            counts[level, EXPERTS_LOAD.name, "native"] += sent / spec.pipeline
    return {key: sent for key, sent in counts.items() if sent}


def _copies(spec: RunSpec) -> Iterator[tuple[str, Fraction]]:
    """By level, bytes of a layer's copies that a rank sends at once, if there are as many as may be."""
    levels, model = spec.levels_of_experts, spec.model
    hops, joined = levels.hops(SELF, WORLD), levels.joined(SELF, WORLD)
    if not spec.copies or joined is None:
        return
    matrices = experts_apart(model, spec.expert).values()
    of_rank = sum(prod(shape[1:]) for shape in matrices) * Fraction(spec.copies, spec.expert)
    sent = of_rank * DTYPE_BYTES[spec.compute_dtype]
    if spec.route == "flat":
        yield from (
            (level, sent * (levels.world - 1) * share) for level, share in joined.shares(None).items()
        )
    else:
        yield hops[-1].level, sent * (hops[-1].count - 1)


def _layers(spec: RunSpec) -> list[int]:
    """By place along pipeline."""
    if not spec.is_in_stages:
        return [spec.model.layers]
    blocks = spec.blocks(spec.model)
    return [sum(blocks[stage] for stage in {action.stage for action in of_rank}) for of_rank in spec.lists]
