"""The ranks along one axis of a job: one process group per hop between neighbouring levels, a lane per level;
and one group per set of hops that are one, a ring or joined, if there are any.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from fractions import Fraction
from functools import cached_property

import torch
import torch.distributed as dist

from lowband.engine.backend import backend
from lowband.engine.transport.gloo import MessageTimes, exchange
from lowband.engine.transport.lane import STATES, Lanes, new_lanes
from lowband.engine.transport.order import Order
from lowband.errors import UserError
from lowband.spec.axes import AxisName
from lowband.spec.mesh import Hop, Joined, Mesh, Ring
from lowband.spec.tiers import TIERS


@dataclass(frozen=True)
class BoundHop:
    """A hop, or several as one, together with this rank's process groups for it."""

    hop: Hop
    group: dist.ProcessGroup
    coordinate: int
    back: dist.ProcessGroup | None  # on gloo: for messages to earlier ranks, see transport.gloo
    times: MessageTimes  # of all hops
    joined: Joined | None = (
        None  # the hops that are one; in a Ring partners pass messages on, see collectives.ring
    )

    @cached_property
    def _partners(self) -> list[int]:
        """Their ranks, in order."""
        return list(self.hop.partners(dist.get_rank()))

    @property
    def is_ring(self) -> bool:
        return isinstance(self.joined, Ring)

    @cached_property
    def places(self) -> list[int]:
        """By partner, which of the equal parts of a buffer is its."""
        return list(range(self.hop.count)) if self.joined is None else self.joined.places

    @cached_property
    def place(self) -> int:
        """Which of the partners' equal parts of a buffer is this rank's."""
        return self.places[self.coordinate]

    @property
    def reorders(self) -> Joined | None:
        """The hops, if the back end moves parts in rank order and that is not the order of the shards."""
        is_reordered = self.joined is not None and self.back is None and len(self.joined.hops) > 1
        return self.joined if is_reordered else None

    @property
    def shares(self) -> dict[str, Fraction]:
        """By level, the part of the bytes that this rank sends over its links."""
        return {self.hop.level: Fraction(1)} if self.joined is None else self.joined.shares(dist.get_rank())

    def exchange(
        self, sent: Sequence[torch.Tensor | None], received: Sequence[torch.Tensor | None], name: str
    ) -> None:
        """On gloo: send sent[i] to partner i and receive received[i] from it. See transport.gloo.exchange."""
        assert self.back is not None
        exchange(sent, received, self._partners, (self.group, self.back), name, self.times)

    def pass_on(self, sent: torch.Tensor, received: torch.Tensor, name: str) -> None:
        """On gloo: send a tensor to the next partner and receive one from the partner before.

        Not timed: all messages of a ring move at the pace of the slowest.
        """
        assert self.back is not None
        partners, here = self.hop.partners(dist.get_rank()), self.coordinate
        ends = partners[(here + 1) % self.hop.count], partners[here - 1]
        exchange((sent, None), (None, received), ends, (self.group, self.back), name, MessageTimes())

    def swap(self, sent: torch.Tensor, received: torch.Tensor, partners: tuple[int, int], name: str) -> None:
        """Send a tensor to one partner, receive one from another. partners: their coordinates, in order"""
        ranks, (to, source) = self.hop.partners(dist.get_rank()), partners
        if self.back is None:
            ops = [
                dist.P2POp(dist.isend, sent, ranks[to], self.group),
                dist.P2POp(dist.irecv, received, ranks[source], self.group),
            ]
            for work in dist.batch_isend_irecv(ops):
                work.wait()
            return
        outgoing: list[torch.Tensor | None] = [None] * self.hop.count
        incoming = list(outgoing)
        outgoing[to], incoming[source] = sent, received
        self.exchange(outgoing, incoming, name)


class Axis:
    """The ranks of a job that differ from this one along one axis of its mesh alone.

    levels: of the machine, as these ranks see them
    rank:   this rank's number in the job
    ranks:  their numbers, in order
    beside: degrees of the job's axes beside data (Axes.beside)
    order:  of the collectives that they submit, which is the same on all of them
    has_replicas: whether a module that is sharded along it is of replicas that meet seldom
    message_times: on gloo, but for rings

    Every rank of the job must make the same ones in the same order, because that creates process groups.
    """

    def __init__(self, name: AxisName, mesh: Mesh, topology: int, beside: str) -> None:
        """topology: number of the topology in this process, the same on every rank"""
        self.name, self.rank, self._job = name, dist.get_rank(), dist.get_world_size()
        self.levels, self.ranks = mesh.levels(name), tuple(mesh.group(name, self.rank))
        self.beside, self.message_times = beside, MessageTimes()
        self.order = Order(f"{topology}/{name}/{self.ranks[0]}", is_first=self.is_first)
        self._calls = itertools.count()
        self._lanes: dict[torch.device, Lanes] = {}
        self._joined: dict[Joined, BoundHop] = {}  # and rings
        self.has_replicas = False
        self._groups = {hop.level: self._bound(hop) for hop in self.levels.hops("self", "world")}

    @property
    def place(self) -> int:
        """This rank's number among them."""
        return self.ranks.index(self.rank)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of them."""
        return self.rank == self.ranks[0]

    def check_alone(self, what: str, known: int = 1) -> None:
        """Raises UserError if the job has other axes than this one and one of `known` ranks."""
        if len(self.ranks) * known < self._job:
            raise UserError(
                f"the job has {self._job} ranks, {len(self.ranks)} of them along its axis {self.name}",
                where=what,
                allowed="a topology without other axes",
            )

    def hops(self, inner: str, outer: str) -> list[BoundHop]:
        """The hops from one level outwards to another, inner first, with this rank's groups."""
        return [self._groups[hop.level] for hop in self.levels.hops(inner, outer)]

    def ring(self, inner: str, outer: str) -> list[BoundHop]:
        """The same hops as one ring, with this rank's groups; none if there are none.

        Every rank must call this, in the same order, because the first call for a ring creates its groups.
        """
        return self._as_one(self.levels.ring(inner, outer))

    def joined(self, inner: str, outer: str) -> list[BoundHop]:
        """The same hops joined to one, likewise."""
        return self._as_one(self.levels.joined(inner, outer))

    def lanes(self, device: torch.device) -> Lanes:
        """The lanes for tensors on a device; every call returns the same ones."""
        if device not in self._lanes:
            self._lanes[device] = new_lanes((*self.levels.names, *TIERS, STATES), device)
        return self._lanes[device]

    def next_call(self) -> int:
        """The number of the next submission; the same on every rank."""
        return next(self._calls)

    def _as_one(self, joined: Joined | None) -> list[BoundHop]:
        if joined is None:
            return []
        if joined not in self._joined:
            bound = self._groups[joined.hop.level] if len(joined.hops) == 1 else self._bound(joined.hop)
            self._joined[joined] = replace(bound, joined=joined)
        return [self._joined[joined]]

    def _bound(self, hop: Hop) -> BoundHop:
        group = new_group(hop)
        back = new_group(hop) if backend(group) == "gloo" else None
        return BoundHop(hop, group, hop.coordinate(self.rank), back, self.message_times)


def new_group(hop: Hop) -> dist.ProcessGroup:
    """A new group of this rank's partners; every rank of the job makes those of all others too.

    It is new even if it has all ranks: the default group carries messages of other code.
    """
    mine, here = None, dist.get_rank()
    for rank in range(dist.get_world_size()):
        if hop.coordinate(rank) == 0:
            partners = hop.partners(rank)
            group = dist.new_group(partners, timeout=world_timeout())
            if here in partners:
                mine = group
    assert mine is not None
    return mine


def world_timeout() -> timedelta:
    """The timeout of torch.distributed's default group; torch's own default where its back end has none."""
    world = dist.group.WORLD
    assert world is not None
    for device in world._device_types:
        options = getattr(world._get_backend(device), "options", None)
        if options is not None:
            timeout: timedelta = options._timeout
            return timeout
    return dist.distributed_c10d.default_pg_timeout  # torch's fake group
