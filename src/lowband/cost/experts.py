"""Bytes that a rank sends in a step to and from experts of other ranks, in closed form.

Of a token, k of E experts are equally likely: what a run counts depends on what its tokens choose. P(m) is
the probability that some of them lie in one of m equal groups of experts. Per token and one way, over hops of
n partners each, from the outside, with m groups before a hop and m' = m n behind it:

    flat, hops   k (n - 1) / n rows (flat: between all ranks, by the levels that these cross)
    merged       (n - 1) m P(m') rows, of k pairs (n - 1) / n

Rows go out and come back, forward and backward, H values each. A pair's row and expert travel as int32, the
row only where rows are merged; there its weight does, too, and its gradient back. Where c experts have copies
in each of n groups of the outermost level, ranks send their weights c (n - 1) times in each forward, and as
much comes back; what part of tokens then need not cross that level depends on loads (cost/popular.py).

Source: counted in test_dispatch; for one level DeepEP's and HetuMoE's exchanges.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import product
from math import comb, prod
from typing import NamedTuple

import numpy as np

from lowband.cost.bytes import experts_apart
from lowband.cost.context import by_hop, passes
from lowband.cost.memory import MASTER_BYTES
from lowband.cost.numbers import Num
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
from lowband.spec.mesh import SELF, WORLD, Hop, Levels
from lowband.spec.model import ModelSpec
from lowband.spec.partition import round_up
from lowband.spec.run import RunSpec
from lowband.spec.step import Collective, Route
from lowband.spec.wire import DTYPE_BYTES

INDEX_BYTES, COUNT_BYTES, LOAD_BYTES = 4, 8, 8  # int32, int64, fp64
AHEAD = 2  # parts on their way before the first is computed, in a forward (engine.parallel.dispatch)


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


class Part(NamedTuple):
    """What a row sends over one level's links in a pass of a layer, in the mean: bytes for each token of a
    rank, bytes for all of them together, messages of a rank."""

    row: Collective
    level: str
    of_token: Fraction
    fixed: Fraction
    messages: Fraction


def parts(
    model: ModelSpec,
    levels: Levels,
    route: Route,
    compute_dtype: str,
    copies: int = 0,
    crossing: Fraction = Fraction(1),
    turns: int = 1,
) -> Iterator[Part]:
    """Of every row to and from the experts of a layer, outermost level first; none of one rank.

    levels:   as ranks with different experts see them
    copies:   as many as there may be; crossing: the part of tokens that may leave their group nevertheless
    turns:    Axes.route_parts: in as many messages
    """
    if model.experts is None:
        return
    merged, none = route == "merged", Fraction(0)
    columns = 2 if merged else 1
    for i, way in enumerate(crossings(levels, route, model.experts, model.top_k)):
        leaves = crossing if i == 0 or route == "flat" else 1
        level, rows, pairs, messages = way.level, leaves * way.rows, leaves * way.pairs, turns * way.messages
        sent, of_pairs = rows * model.hidden * DTYPE_BYTES[compute_dtype], pairs * columns * INDEX_BYTES
        for row in (ROUTE_OUT, ROUTE_BACK, ROUTE_OUT_GRAD, ROUTE_BACK_GRAD):
            yield Part(row, level, sent, none, messages)
        yield Part(ROUTE_PAIRS, level, of_pairs, none, messages)
        yield Part(ROUTE_COUNTS, level, none, messages * columns * COUNT_BYTES, messages)
        for row in (ROUTE_WEIGHTS, ROUTE_WEIGHTS_GRAD) if merged else ():
            yield Part(row, level, pairs * MASTER_BYTES, none, messages)
    for level, sent, messages in _copies(model, levels, route, copies):
        for row in (EXPERT_COPIES, EXPERT_COPIES_GRAD):
            yield Part(row, level, none, sent * DTYPE_BYTES[compute_dtype], messages)


def _copies(
    model: ModelSpec, levels: Levels, route: Route, copies: int
) -> Iterator[tuple[str, Fraction, Fraction]]:
    """By level, elements and messages of a layer's copies that a rank sends at once."""
    joined = levels.joined(SELF, WORLD)
    if not copies or joined is None:
        return
    matrices = experts_apart(model, levels.world).values()
    sent = sum(prod(shape[1:]) for shape in matrices) * Fraction(copies, levels.world)
    if route == "flat":
        for level, share in joined.shares(None).items():
            messages = (levels.world - 1) * share
            yield level, sent * messages, messages
        return
    outermost = levels.hops(SELF, WORLD)[-1]
    yield outermost.level, sent * (outermost.count - 1), Fraction(outermost.count - 1)


def groups_of(levels: Levels, route: Route) -> int:
    """Groups of ranks that have a copy each of an expert that has any."""
    return levels.world if route == "flat" else levels.hops(SELF, WORLD)[-1].count


def copied_bytes(model: ModelSpec, levels: Levels, route: Route, compute_dtype: str, copies: int) -> int:
    """What a layer keeps from forward to backward where some of its experts have copies: weights of a rank's
    own experts and of all copies that it may have, together; 0 without copies.

    levels: as ranks with different experts see them
    """
    if not copies or levels.world == 1:
        return 0
    groups, per = groups_of(levels, route), (model.experts or 0) // levels.world
    an_expert = sum(prod(shape[1:]) for shape in experts_apart(model, levels.world).values())
    return DTYPE_BYTES[compute_dtype] * an_expert * (per + min(copies, (groups - 1) * per))


def experts_bytes(spec: RunSpec) -> dict[tuple[str, str, str], Fraction]:
    """(level, collective, wire) -> bytes that a rank sends in an optimizer step, in the mean; of a pipeline,
    over its ranks, too."""
    divided = spec.context * (spec.tensor if spec.sequence_parallel else 1)
    axes = [spec.levels, *([spec.mesh.levels("tensor")] if spec.sequence_parallel else [])]
    return sent_to_experts(
        spec.model, spec.levels_of_experts, spec.route, axes, _layers(spec),
        Fraction(spec.micro_batch * spec.seq_len, divided), spec.accumulation, spec.recompute == "full",
        spec.compute_dtype, spec.copies, turns=spec.route_parts,
    )  # fmt: skip


def in_turns_s(turns: int, out_s: Num, compute_s: Num, back_s: Num, ahead: int) -> Num:
    """Seconds until all parts of a rank's tokens are back from their experts.

    out_s, back_s: of all exchanges there, and back, one after the other; compute_s: of all products
    ahead:         parts that start before the first is computed; then one more for each that is
    """
    out, compute, back = out_s / turns, compute_s / turns, back_s / turns
    came = [out * (part + 1) for part in range(min(ahead, turns))]
    link, computed = came[-1], 0 * compute
    for part in range(turns):
        computed = np.maximum(computed, came[part]) + compute
        link = np.maximum(link, computed) + back
        if len(came) < turns:
            link = link + out
            came.append(link)
    return link


def sent_to_experts(
    model: ModelSpec,
    levels: Levels,
    route: Route,
    token_axes: Sequence[Levels],
    layers: Sequence[int],
    tokens: Fraction,
    accumulation: int,
    is_recomputed: bool,
    compute_dtype: str,
    copies: int = 0,
    crossing: Fraction = Fraction(1),
    turns: int = 1,
) -> dict[tuple[str, str, str], Fraction]:
    """The same by its terms.

    token_axes: levels of the axes whose ranks have different tokens; layers: by place along pipeline
    tokens:     of a rank and micro-batch
    """
    counts = defaultdict[tuple[str, str, str], Fraction](Fraction)
    for part in parts(model, levels, route, compute_dtype, copies, crossing, turns):
        times = Fraction(accumulation * passes(part.row, is_recomputed) * sum(layers), len(layers))
        counts[part.level, part.row.name, "native"] += (part.of_token * tokens + part.fixed) * times
    for along, of_place in product(token_axes, layers):
        for hop, sent in load_by_hop(model, of_place, along):
            counts[hop.level, EXPERTS_LOAD.name, "native"] += sent / len(layers)
    return {key: sent for key, sent in counts.items() if sent}


def load_by_hop(model: ModelSpec, layers: int, levels: Levels) -> Iterator[tuple[Hop, Fraction]]:
    """What a rank sends over each hop to sum the loads of so many layers' experts, once a step."""
    whole = LOAD_BYTES * round_up(layers * (model.experts or 0), levels.world)
    yield from by_hop(EXPERTS_LOAD, Fraction(whole), levels)


def _layers(spec: RunSpec) -> list[int]:
    """By place along pipeline."""
    if not spec.is_in_stages:
        return [spec.model.layers]
    blocks = spec.blocks(spec.model)
    return [sum(blocks[stage] for stage in {action.stage for action in of_rank}) for of_rank in spec.lists]
