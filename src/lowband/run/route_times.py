"""Times of tokens' ways to experts and back on a box's shaped links: rows of `routes.csv`.

Every rank has other tokens and other experts. Tokens choose by their shares of Zipf's law (skew 0: all
experts alike). First the routes: nothing takes time but a forward's exchanges. Then copies of the most
popular experts (FSSDP): an expert takes a stated time for a token, so a forward waits for the rank with most.
Last tokens in parts (FSMoE), with experts that take no time, which shows what a message costs, and some.
Runs in a private network (box.network.private_command).
"""

import math
import time
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist

from lowband.box import links
from lowband.box.layout import Layout
from lowband.box.network import enter_place
from lowband.cost.experts import crossings
from lowband.engine.collectives.experts import ExpertAxis
from lowband.engine.parallel.dispatch import Dispatch
from lowband.engine.parallel.hot_experts import HotExperts
from lowband.engine.transport.topology import Topology
from lowband.run.on_ranks import on_ranks
from lowband.spec.axes import Axes
from lowband.spec.machine import Machine
from lowband.spec.step import Route

EXPERTS, WIDTH = 64, 4  # width: of an expert's two matrices, over hidden
_START_S, _SLOWEST = 120, 8  # for starting ranks; how many times the target a forward may take


class Case(NamedTuple):
    """What is timed.

    hidden: of a token's row, in fp32
    paced:  whether experts take time: as much as the exchanges of the routes, if all ranks are equally loaded
    parts:  that take turns (Axes.route_parts)
    """

    route: Route
    top_k: int
    hidden: int
    skew: float
    copies: int = 0
    paced: bool = False
    parts: int = 1


ROUTES = [
    Case(route, 8, *each) for each in product((16, 256), (0.0, 1.0)) for route in ("flat", "hops", "merged")
]
SKEWS = [
    Case("merged", 2, 16, skew, copies, paced=True) for skew in (0.0, 0.5, 1.0, 1.5) for copies in (0, 4)
]
PARTS = [
    Case(route, 4, 16, 0.0, paced=paced, parts=parts)
    for paced in (False, True) for parts in (1, 2, 4, 8) for route in ("flat", "merged")
]  # fmt: skip


class Routed(NamedTuple):
    """One forward of all ranks at once.

    tokens:        of each rank
    row_bytes:     of a token's activations
    slow_rows:     that travelled over the outermost level's links, of all ranks, one way
    expected_rows: the same, if all experts are equally likely and none has copies (cost.experts)
    load:          pairs of the rank with the most, over the mean
    compute_s:     that its experts took
    took_s:        from the first rank's start to the last one's end
    links_s:       of rows at the links' rates, there and back, if all experts are equally likely and none has
                   copies: hops one after the other, or of `flat`, which uses all levels at once, the slowest
    """

    cluster: str
    ranks: int
    route: Route
    top_k: int
    skew: float
    copies: int
    parts: int
    tokens: int
    row_bytes: int
    repeat: int
    slow_rows: int
    expected_rows: float
    load: float
    compute_s: float
    took_s: float
    links_s: float


def time_routes(machine: Machine, ranks: int, seconds: float, repeats: int) -> list[Routed]:
    """Create the links in this private network and time all cases over them, those of a kind in turns.

    seconds: target time of a forward by the slowest route at the links' rates
    """
    layout = Layout.of(machine, ranks)
    links.network_up(layout)
    return on_ranks(
        ranks,
        lambda: list(_time_all(layout, seconds, repeats)),
        time_limit_s=_START_S + _SLOWEST * len(ROUTES + SKEWS + PARTS) * (repeats + 1) * seconds,
        enter=lambda rank: enter_place(layout.place(rank)),
    )[0]


def links_s(layout: Layout, case: Case) -> float:
    """See Routed; of one token of each rank."""
    there_and_back = 2 * 4 * case.hidden
    each = [
        float(way.rows) * there_and_back / layout.bytes_per_s(layout.levels.index(way.level))
        for way in crossings(layout.levels, case.route, EXPERTS, case.top_k)
    ]
    return max(each, default=0.0) if case.route == "flat" else math.fsum(each)


def _time_all(layout: Layout, seconds: float, repeats: int) -> Iterator[Routed]:
    ranks, axes = layout.levels.world, {}
    for route in ("flat", "hops", "merged"):
        topology = Topology(layout.machine.sizes, Axes(expert=ranks, route=route))
        axes[route] = ExpertAxis(topology.along("expert"), topology.along("alike"), route)
    outermost = layout.levels.hops("self", "world")[-1].level
    for cases, repeat in product((ROUTES, SKEWS, PARTS), range(repeats + 1)):
        for case in cases:
            slowest = max(links_s(layout, case._replace(route=route)) for route in axes)
            tokens = max(round(seconds / slowest), 1)
            token_s = seconds / tokens / case.top_k if case.paced else 0.0
            found = _Forward(axes[case.route], case, tokens, repeat, token_s).run()
            if repeat == 0:
                continue  # untimed: opens connections and TCP windows
            rows = {way.level: way.rows for way in crossings(layout.levels, case.route, EXPERTS, case.top_k)}
            yield Routed(
                layout.machine.name, ranks, case.route, case.top_k, case.skew, case.copies, case.parts,
                tokens, 4 * case.hidden, repeat, found.sent[outermost] // (4 * case.hidden),
                float(rows[outermost] * tokens * ranks), found.load, found.compute_s, found.took_s,
                links_s(layout, case) * tokens,
            )  # fmt: skip


class _Found(NamedTuple):
    """sent: bytes of rows that went out, of all ranks, by level"""

    took_s: float
    load: float
    compute_s: float
    sent: Counter[str]


class _Forward:
    """A layer's forward on this rank. token_s: of each pair of a token and an expert here"""

    def __init__(self, axis: ExpertAxis, case: Case, tokens: int, repeat: int, token_s: float) -> None:
        self._axis, self._case, self._tokens, self._token_s = axis, case, tokens, token_s
        # Which experts are popular is the same on every rank.
        order = torch.randperm(EXPERTS, generator=torch.Generator().manual_seed(repeat))
        shares = (1 + torch.arange(EXPERTS, dtype=torch.float64)) ** -case.skew
        generator = torch.Generator().manual_seed(1000 * repeat + axis.place)
        self._experts = order[torch.multinomial(shares.expand(tokens, -1), case.top_k, generator=generator)]
        self._hot = HotExperts(axis, EXPERTS, case.copies)
        self._hot.set(sorted(order[: case.copies].tolist()))
        self._pairs, axis.parts = 0, case.parts

    def _compute(
        self, x: torch.Tensor, _: torch.Tensor, places: torch.Tensor, __: torch.Tensor | None
    ) -> torch.Tensor:
        self._pairs += len(places)
        time.sleep(len(places) * self._token_s)
        return x[places]

    def run(self) -> _Found:
        case, axis = self._case, self._axis
        dispatch = Dispatch(axis, EXPERTS, self._compute, "experts", self._hot)
        rows = torch.arange(self._tokens).repeat_interleave(case.top_k)
        x, weights = torch.ones(self._tokens, case.hidden), torch.full((len(rows),), 1 / case.top_k)
        own = torch.ones(EXPERTS // axis.ranks, 2 * WIDTH * case.hidden**2)
        axis.ledger.take()
        dist.barrier()
        start = time.monotonic()
        self._hot.weights(own, "experts")
        dispatch(x, rows, self._experts.flatten(), weights)
        ends = torch.tensor([-start, time.monotonic(), self._pairs], dtype=torch.float64)
        dist.all_reduce(ends, op=dist.ReduceOp.MAX)
        names = axis.axis.levels.names
        sent = Counter({s.level: s.bytes for s in axis.ledger.take() if s.collective == "route_out"})
        total = torch.tensor([sent[name] for name in names], dtype=torch.float64)
        dist.all_reduce(total)
        most = ends[2].item()
        by_level = Counter(dict(zip(names, total.long().tolist(), strict=True)))
        took_s = (ends[0] + ends[1]).item()
        return _Found(took_s, most / len(rows), most * self._token_s, by_level)
