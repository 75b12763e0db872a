"""Exchanges between the ranks along context, inside of forward and backward (rows: spec.activations).

Every rank makes the same ones in the same order. They have lanes and an order of their own, as those along
tensor have (collectives.activations).
"""

from collections.abc import Callable, Sequence
from math import prod

import torch

from lowband.engine.collectives.collectives import Collectives
from lowband.engine.collectives.hops import all_to_all, count_bytes
from lowband.engine.options import Options
from lowband.engine.transport.axis import Axis, BoundHop
from lowband.engine.transport.call import Call
from lowband.engine.transport.lane import Handle, Work, outside_of_modes
from lowband.engine.transport.ledger import Ledger
from lowband.engine.transport.meter import MemoryMeter
from lowband.spec.activations import ALONG
from lowband.spec.context import WAYS, Layout, Way
from lowband.spec.mesh import SELF, WORLD
from lowband.spec.step import Collective


class Passing:
    """A tensor on its way to the next rank of a ring, and one from the rank before."""

    def __init__(self, handle: Handle, received: list[torch.Tensor], like: torch.Tensor) -> None:
        self._handle, self._received, self._shape = handle, received, like.shape

    def wait(self) -> torch.Tensor:
        """What the rank before sent, of the same shape."""
        self._handle.wait()
        return self._received.pop().view(self._shape)


class ContextExchanges:
    """ledger: where their bytes are counted; their buffers belong to autograd's memory and are not counted"""

    def __init__(self, axis: Axis, layout: Layout) -> None:
        self.axis, self.layout, self.ledger = axis, layout, Ledger()
        self._of: dict[torch.device, Collectives] = {}
        self._ring = axis.ring(*layout.span("ring"))  # on all ranks at once: this makes its groups

    def count_in(self, ledger: Ledger) -> None:
        """Count what is sent from now on in another ledger."""
        self.ledger, self._of = ledger, {}

    def coordinate(self, way: Way) -> int:
        """This rank's number among those that attend so."""
        inside = prod(self.layout.ranks(each) for each in WAYS[: WAYS.index(way)])
        return self.axis.place // inside % self.layout.ranks(way)

    @outside_of_modes()
    def gathered(self, x: torch.Tensor, row: Collective, name: str, everywhere: bool = False) -> torch.Tensor:
        """The tensors of the ranks that gather, all of one shape, stacked in the order of their numbers.

        everywhere: of all ranks along context instead
        """
        inner, outer = (SELF, WORLD) if everywhere else self.layout.span("gather")
        ranks = len(self.axis.ranks) if everywhere else self.layout.ranks("gather")
        flat = x.contiguous().view(-1)
        whole = flat.new_empty(ranks * flat.numel())

        def work(collectives: Collectives, call: Call) -> Work:
            yield from collectives.gather(call, flat, whole, inner, outer, row.name)

        levels = [hop.level for hop in reversed(self.axis.levels.hops(inner, outer))]
        self.submit(x, name, levels, work).wait()
        return whole.view(ranks, *x.shape)[self._places(inner, outer)]

    @outside_of_modes()
    def scattered(self, parts: torch.Tensor, row: Collective, name: str) -> torch.Tensor:
        """This rank's part of the sum over the ranks that gather. parts: stacked by their numbers"""
        inner, outer = self.layout.span("gather")
        places = self._places(inner, outer)
        by_place = sorted(range(len(places)), key=places.__getitem__)
        full, found = [parts[by_place].contiguous().view(-1)], list[torch.Tensor]()

        def work(collectives: Collectives, call: Call) -> Work:
            mine = yield from collectives.reduce_scatter(call, call.hold(full.pop()), inner, outer, row.name)
            call.release(mine)
            found.append(mine)

        levels = [hop.level for hop in self.axis.levels.hops(inner, outer)]
        self.submit(parts, name, levels, work).wait()
        return found.pop().view(parts.shape[1:])

    @outside_of_modes()
    def pass_on(self, x: torch.Tensor, row: Collective, name: str) -> Passing:
        """Start to send a tensor to the next rank of the ring."""
        [bound] = self._ring
        flat, received = x.contiguous().view(-1), list[torch.Tensor]()

        def work(_: Collectives, call: Call) -> Work:
            yield bound.hop.level, [flat]
            into = torch.empty_like(flat)
            ends = (bound.coordinate + 1) % bound.hop.count, (bound.coordinate - 1) % bound.hop.count
            bound.swap(flat, into, ends, call.name(row.name))
            count_bytes(call, bound, row.name, "native", flat.nbytes)
            received.append(into)

        return Passing(self.submit(flat, name, [bound.hop.level], work), received, x)

    @outside_of_modes()
    def swapped(self, x: torch.Tensor, split: int, join: int, row: Collective, name: str) -> torch.Tensor:
        """Parts of a tensor along `split` go to the ranks of heads; those from them are joined along `join`.

        Level by level: from the inside where heads (dim 1) are split, from the outside where tokens are.
        """
        hops = self.axis.hops(*self.layout.span("heads"))
        for bound in hops if split == 1 else reversed(hops):
            parts = torch.stack([part.contiguous() for part in x.chunk(bound.hop.count, split)])
            x = torch.cat([*self._exchanged(parts, bound, row, name)], join)
        return x

    def _exchanged(self, parts: torch.Tensor, bound: BoundHop, row: Collective, name: str) -> torch.Tensor:
        """A part to each partner of a hop, and one from each, in their order."""
        messages, found = [parts.view(bound.hop.count, -1)], list[torch.Tensor]()

        def work(_: Collectives, call: Call) -> Work:
            yield bound.hop.level, messages
            found.append(all_to_all(call, call.hold(messages.pop()), bound, row.name))

        self.submit(parts, name, [bound.hop.level], work).wait()
        return found.pop().view(parts.shape)

    def submit(
        self, x: torch.Tensor, name: str, levels: Sequence[str], work: Callable[[Collectives, Call], Work]
    ) -> Handle:
        """Start an exchange of a tensor. levels: that its work yields, in order"""
        if (collectives := self._of.get(x.device)) is None:
            collectives = Collectives(ALONG, self.axis, self.ledger, MemoryMeter(), x.device, Options())
            self._of[x.device] = collectives
        return collectives.submit(name, levels, lambda call: work(collectives, call), [x], self.ledger)

    # Shards are numbered from the innermost level, which cuts first; ranks from the outermost.

    def _places(self, inner: str, outer: str) -> list[int]:
        """By rank, the place of its shard."""
        joined = self.axis.levels.joined(inner, outer)
        return [0] if joined is None else joined.places
