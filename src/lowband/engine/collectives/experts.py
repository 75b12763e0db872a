"""Exchanges between ranks that have different experts: rows of tokens, as many to each partner as it needs.

They are made inside of forward and backward, on lanes and in an order of their own, as those along tensor are
(collectives.activations). Rows: spec.activations.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from lowband.engine.collectives.activations import Along
from lowband.engine.collectives.collectives import Collectives
from lowband.engine.collectives.hops import all_to_all
from lowband.engine.transport.axis import Axis, BoundHop
from lowband.engine.transport.call import Call
from lowband.engine.transport.lane import Handle, Work, outside_of_modes
from lowband.errors import UserError
from lowband.spec.activations import ROUTE_COUNTS
from lowband.spec.axes import check_parts
from lowband.spec.mesh import SELF, WORLD
from lowband.spec.scheme import Scheme
from lowband.spec.step import Collective, Route


class ExpertAxis(Along):
    """The ranks that have different experts.

    alike:  the axis of those that have the same ones, over which these are sharded and averaged
    hops:   of a token's way to an expert, the outermost first; one between all ranks if the route is flat
    merges: whether a token travels once to each partner of a hop, whatever number of experts it has there
    parts:  of a rank's tokens, which take turns on their way

    Every rank must make this, in the same order, because that creates process groups.
    """

    def __init__(self, axis: Axis, alike: Axis, route: Route, parts: int = 1) -> None:
        super().__init__(axis)
        self.alike, self.merges, self.parts = alike, route == "merged", parts
        self.hops = axis.joined(SELF, WORLD) if route == "flat" else axis.hops(SELF, WORLD)[::-1]

    def __deepcopy__(self, memo: object) -> "ExpertAxis":
        what = "experts that are spread over ranks cannot be copied: a copy would not know which they are"
        raise UserError(what, where="deepcopy", allowed="deepcopy before lowband.spread_experts")

    def check(self, schemes: Sequence[Scheme]) -> None:
        """Raises UserError for schemes that cannot be placed on the ranks with the same experts."""
        for scheme in schemes:
            scheme.check(self.alike.levels)
            check_parts(self.parts, scheme, len(self.alike.ranks))
            if scheme.sync is not None:
                raise UserError(
                    f"expert {self.ranks}: replicas that meet seldom must have all experts each",
                    where=f"scheme '{scheme.name}'",
                    allowed="schemes without sync",
                )

    @outside_of_modes()
    def counts(self, mine: torch.Tensor, bound: BoundHop, name: str) -> torch.Tensor:
        """What partners have counted for this rank. mine: [partners, n] int64, on any device"""
        found: list[torch.Tensor] = []
        by_place = torch.empty_like(mine)
        by_place[bound.places] = mine

        def work(_: Collectives, call: Call) -> Work:
            yield bound.hop.level, [by_place]
            found.append(all_to_all(call, call.hold(by_place), bound, ROUTE_COUNTS.name))

        self._submit(by_place, bound, name, work).wait()
        return found.pop()[bound.places]

    @outside_of_modes()
    def exchange(
        self,
        x: torch.Tensor,
        to: Sequence[int],
        came: Sequence[int],
        bound: BoundHop,
        row: Collective,
        name: str,
    ) -> tuple[torch.Tensor, Handle]:
        """The rows that partners send to this rank, in the order of partners: [sum of came, ...], 0 until
        they have come.

        x:        [sum of to, ...], sorted by partner
        to, came: rows to and from each of the hop's partners
        """
        x = x.contiguous()
        received = x.new_zeros(sum(came), *x.shape[1:])
        sent, into = x.split([*to]), received.split([*came])
        partners = bound.hop.partners(self.axis.rank)

        def work(_: Collectives, call: Call) -> Work:
            yield bound.hop.level, [x, received]
            if bound.back is not None:
                into[bound.coordinate].copy_(sent[bound.coordinate])
                bound.exchange(_filled(sent), _filled(into), call.name(row.name))
            else:
                dist.all_to_all_single(received, x, [*came], [*to], group=bound.group)
            for partner, part in zip(partners, sent, strict=True):
                if partner != self.axis.rank:
                    level = self.axis.levels.common(self.axis.rank, partner)
                    call.ledger.add(level, row.name, "native", part.nbytes)

        return received, self._submit(x, bound, name, work)

    def exchanged(self, *args: Any) -> torch.Tensor:
        """The rows of `exchange`, once they have come."""
        received, handle = self.exchange(*args)
        handle.wait()
        return received

    def _submit(self, x: torch.Tensor, bound: BoundHop, name: str, work: Any) -> Handle:
        collectives = self._collectives(x.device)
        return collectives.submit(name, [bound.hop.level], lambda call: work(collectives, call), [x])


def _filled(parts: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """None for those without elements, for which there is no message."""
    return [part if part.numel() else None for part in parts]
