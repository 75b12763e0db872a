"""Times of tokens' ways to experts and back on a box's shaped links: rows of `routes.csv`.

Every rank has other tokens and other experts, which return what they are given, so that nothing is timed but
the exchanges of a forward. Tokens choose by their shares of Zipf's law (0: all experts alike).
Runs in a private network (box.network.private_command).
"""

import math
import time
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple, get_args

import torch
import torch.distributed as dist

from lowband.box import links
from lowband.box.layout import Layout
from lowband.box.network import enter_place
from lowband.cost.experts import crossings
from lowband.engine.collectives.experts import ExpertAxis
from lowband.engine.parallel.dispatch import Dispatch
from lowband.engine.transport.topology import Topology
from lowband.run.on_ranks import on_ranks
from lowband.spec.axes import Axes, Route
from lowband.spec.machine import Machine
from lowband.spec.mesh import Levels

EXPERTS, TOP_K = 64, 8
HIDDEN = (16, 256)  # of rows of 64 bytes and of 1 KiB, in fp32
SKEWS = (0.0, 1.0)
_START_S, _SLOWEST = 120, 8  # for starting ranks; how many times the target a step may take


class Routed(NamedTuple):
    """One forward of all ranks at once.

    tokens:          of each rank
    row_bytes:       of a token's activations
    slow_rows:       that travelled over the outermost level's links, of all ranks, one way
    expected_rows:   the same, if all experts are equally likely (cost.experts)
    took_s:          from the first rank's start to the last one's end
    closed_form_s:   of rows at the links' rates, there and back, if all experts are equally likely: hops one
                     after the other, or of `flat`, which uses all levels at once, the slowest
    """

    cluster: str
    ranks: int
    route: Route
    skew: float
    tokens: int
    row_bytes: int
    repeat: int
    slow_rows: int
    expected_rows: float
    took_s: float
    closed_form_s: float


def time_routes(machine: Machine, ranks: int, seconds: float, repeats: int) -> list[Routed]:
    """Create the links in this private network and time every route over them, in turns.

    seconds: target time of the slowest route's forward at the links' rates
    """
    layout = Layout.of(machine, ranks)
    links.network_up(layout)
    cases = len(HIDDEN) * len(SKEWS) * len(get_args(Route))
    return on_ranks(
        ranks,
        lambda: list(_time_routes(layout, seconds, repeats)),
        time_limit_s=_START_S + _SLOWEST * cases * (repeats + 1) * seconds,
        enter=lambda rank: enter_place(layout.place(rank)),
    )[0]


def closed_form_s(layout: Layout, levels: Levels, route: Route, tokens: int, row_bytes: int) -> float:
    """See Routed."""
    ways = 2
    each = [
        float(way.rows) * tokens * row_bytes * ways / layout.bytes_per_s(layout.levels.index(way.level))
        for way in crossings(levels, route, EXPERTS, TOP_K)
    ]
    return max(each, default=0.0) if route == "flat" else math.fsum(each)


def _time_routes(layout: Layout, seconds: float, repeats: int) -> Iterator[Routed]:
    ranks, machine, axes = layout.levels.world, layout.machine, {}
    for route in get_args(Route):
        topology = Topology(machine.sizes, Axes(expert=ranks, route=route))
        axes[route] = ExpertAxis(topology.along("expert"), topology.along("alike"), route)
    for skew, hidden in product(SKEWS, HIDDEN):
        row_bytes = 4 * hidden
        slowest = max(closed_form_s(layout, layout.levels, route, 1, row_bytes) for route in axes)
        tokens = max(round(seconds / slowest), 1)
        for repeat, (route, axis) in product(range(repeats + 1), axes.items()):
            took_s, sent = _time(axis, _chosen(skew, tokens, dist.get_rank(), repeat), hidden)
            if repeat == 0:
                continue  # untimed: opens connections and TCP windows
            rows = {way.level: way.rows for way in crossings(layout.levels, route, EXPERTS, TOP_K)}
            outermost = next(iter(rows if route != "flat" else reversed(rows)))
            yield Routed(
                machine.name, ranks, route, skew, tokens, row_bytes, repeat,
                sent[outermost] // row_bytes,
                float(rows[outermost] * tokens * ranks),
                took_s,
                closed_form_s(layout, layout.levels, route, tokens, row_bytes),
            )  # fmt: skip


def _chosen(skew: float, tokens: int, rank: int, repeat: int) -> torch.Tensor:
    """[tokens, TOP_K] experts of each token. Which experts are popular is the same on every rank."""
    order = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(repeat))
    shares = (1 + torch.arange(EXPERTS, dtype=torch.float64)) ** -skew
    generator = torch.Generator().manual_seed(1000 * repeat + rank)
    drawn = torch.multinomial(shares.expand(tokens, -1), TOP_K, generator=generator)
    return order[drawn]


def _time(axis: ExpertAxis, experts: torch.Tensor, hidden: int) -> tuple[float, Counter[str]]:
    """Seconds; and bytes of rows that went out, of all ranks, by level."""
    tokens = len(experts)
    rows = torch.arange(tokens).repeat_interleave(TOP_K)
    dispatch = Dispatch(axis, EXPERTS, lambda x, _, places, __: x[places], "experts")
    x, weights = torch.ones(tokens, hidden), torch.full((tokens * TOP_K,), 1 / TOP_K)
    axis.ledger.take()
    dist.barrier()
    start = time.monotonic()
    dispatch(x, rows, experts.flatten(), weights)
    span = torch.tensor([-start, time.monotonic()], dtype=torch.float64)
    dist.all_reduce(span, op=dist.ReduceOp.MAX)
    names = axis.axis.levels.names
    sent = Counter({each.level: each.bytes for each in axis.ledger.take() if each.collective == "route_out"})
    total = torch.tensor([sent[name] for name in names], dtype=torch.float64)
    dist.all_reduce(total)
    return span.sum().item(), Counter(dict(zip(names, total.long().tolist(), strict=True)))
