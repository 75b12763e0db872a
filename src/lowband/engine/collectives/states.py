"""States of linear layers between the ranks along context: a rank gets the sum of those before it.

A state is as large for any number of tokens. In the backward its gradients go the other way: a rank gets the
sum of those behind it. How they travel, each a generator for lanes, level by level:

    pass     from rank to rank, each adding its own: one message a rank, but one after the other
    gather   all to every rank, which adds those before it
    scan     inside a group of each level first; a rank then has the k-th part of its group's sum, and gets
             the k-th parts of the groups before: a slow level carries one state per group, not per rank

Every sum starts at the sequence's end that its ranks lie towards, and adds in their order; scan adds what
lies before a group, then what lies before in it.

Source: LASP (arXiv 2404.02882, section 2.2), LASP-2 (arXiv 2502.07563, section 3); scan is ours.
"""

from collections.abc import Generator, Sequence
from math import prod

import torch
import torch.nn.functional as F

from lowband.engine.collectives.collectives import Collectives
from lowband.engine.collectives.context import ContextExchanges
from lowband.engine.collectives.hops import gather_hops
from lowband.engine.transport.axis import BoundHop
from lowband.engine.transport.call import Call
from lowband.engine.transport.lane import Handle, Work, outside_of_modes
from lowband.engine.transport.messages import Messages
from lowband.spec.activations import CONTEXT_STATES
from lowband.spec.mesh import SELF, WORLD
from lowband.spec.step import Collective, States

NAME = "states"
Travels = Generator[tuple[str, Sequence[torch.Tensor]], None, torch.Tensor]  # see transport.lane.Work


class Coming:
    """The sum of other ranks' states, on its way."""

    def __init__(self, handle: Handle, found: list[torch.Tensor], like: torch.Tensor) -> None:
        self._handle, self._found, self._shape = handle, found, like.shape

    def wait(self) -> torch.Tensor:
        """The sum, of the shape of a state."""
        self._handle.wait()
        return self._found.pop().view(self._shape)


class StateExchanges:
    """exchanges: of the ranks along context, which submit and count these too; all ranks make it at once"""

    def __init__(self, exchanges: ContextExchanges, states: States) -> None:
        self._exchanges, self._axis = exchanges, exchanges.axis
        self._messages = Messages(self._axis) if states == "pass" else None
        self._rows = CONTEXT_STATES[states]
        self._travel = {"pass": self._passed, "gather": self._gathered, "scan": self._scanned}[states]
        inwards = [bound.hop.level for bound in reversed(self._axis.hops(SELF, WORLD))]
        by_level = {"pass": inwards[:1], "gather": inwards, "scan": [*reversed(inwards), *inwards[1:]]}
        self._levels = by_level[states]

    def sum_before(self, state: torch.Tensor) -> Coming:
        """Start to get the sum of the states of the ranks before this one. state: its own, any shape"""
        return self._start(state, is_back=False)

    def sum_behind(self, grad: torch.Tensor) -> Coming:
        """The same of the ranks behind it, of gradients of states."""
        return self._start(grad, is_back=True)

    @outside_of_modes()
    def _start(self, state: torch.Tensor, is_back: bool) -> Coming:
        flat, found = state.contiguous().view(-1), list[torch.Tensor]()

        def work(collectives: Collectives, call: Call) -> Work:
            found.append((yield from self._travel(collectives, call, flat, self._rows[is_back], is_back)))

        return Coming(self._exchanges.submit(flat, NAME, self._levels, work), found, state)

    def _passed(
        self, _: Collectives, call: Call, flat: torch.Tensor, row: Collective, is_back: bool
    ) -> Travels:
        """LASP: the sum so far, from rank to rank."""
        assert self._messages is not None
        axis, here, name = self._axis, self._axis.place, call.name(row.name)
        yield self._levels[0], [flat]
        source, to = (here + 1, here - 1) if is_back else (here - 1, here + 1)
        known = range(len(axis.ranks))
        before = torch.zeros_like(flat)
        if source in known:
            received = self._messages.receive(flat.shape, flat.dtype, flat.device, source, name)
            before = received.wait().to(flat.device)
        sent = {hop.level: 0 for hop in axis.levels.hops(SELF, WORLD)}
        if to in known:
            self._messages.send(before + flat, to, name).wait()
            sent[axis.levels.common(axis.ranks[here], axis.ranks[to])] = flat.nbytes
        for level, of_level in sent.items():  # also 0 bytes, so that all ranks count under the same keys
            call.ledger.add(level, row.name, "native", of_level)
        return before

    def _gathered(
        self, collectives: Collectives, call: Call, flat: torch.Tensor, row: Collective, is_back: bool
    ) -> Travels:
        """LASP-2: all states to every rank."""
        joined = self._axis.levels.joined(SELF, WORLD)
        assert joined is not None
        whole = flat.new_empty(len(joined.places) * flat.numel())
        yield from collectives.gather(call, flat, whole, SELF, WORLD, row.name)
        by_rank = whole.view(len(joined.places), -1)[joined.places]
        return _before(by_rank, self._axis.place, is_back)

    def _scanned(
        self, _: Collectives, call: Call, flat: torch.Tensor, row: Collective, is_back: bool
    ) -> Travels:
        """Ours: outwards parts of the groups' sums, inwards parts of what lies before."""
        hops, before = self._axis.hops(SELF, WORLD), list[torch.Tensor]()
        mine = F.pad(flat, (0, -flat.numel() % prod(bound.hop.count for bound in hops[:-1])))
        for bound in hops:
            yield bound.hop.level, [mine]
            of_group = yield from _of_group(call, mine, bound, row)
            before.append(_before(of_group, bound.coordinate, is_back))
            if bound is not hops[-1]:
                mine = _sum(of_group, mine, is_back).view(bound.hop.count, -1)[bound.coordinate].clone()
        found = before.pop()
        for bound in reversed(hops[:-1]):
            yield bound.hop.level, [found]
            of_group = yield from _of_group(call, found, bound, row)
            found = of_group.view(-1) + before.pop()
        return found[: flat.numel()]


def _of_group(
    call: Call, mine: torch.Tensor, bound: BoundHop, row: Collective
) -> Generator[tuple[str, Sequence[torch.Tensor]], None, torch.Tensor]:
    """What the partners of a hop have, by their numbers. In the hop's lane."""
    found = mine.new_empty(bound.hop.count, mine.numel())
    found[bound.coordinate] = mine
    yield from gather_hops(call, found.view(-1), [bound], row.name, "native")
    return found


def _before(by_rank: torch.Tensor, place: int, is_back: bool) -> torch.Tensor:
    """The sum of what those before a place have; of those behind it, if back."""
    return _sum(by_rank[place + 1 :] if is_back else by_rank[:place], by_rank[0], is_back)


def _sum(rows: torch.Tensor, like: torch.Tensor, is_back: bool) -> torch.Tensor:
    """One after the other, if back from the last one: a reference can repeat it bit by bit."""
    found, ordered = torch.zeros_like(like), rows.flip(0) if is_back else rows
    for row in ordered:
        found += row
    return found
