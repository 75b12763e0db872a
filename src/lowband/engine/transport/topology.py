"""The process groups and lanes of a job: one group per hop between neighbouring levels, a lane per level; and
one group per set of hops that are one, a ring or joined, if there are any.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lowband.engine.transport.consistency import check_same, is_alone
from lowband.engine.transport.gloo import MessageTimes, exchange
from lowband.engine.transport.hosts import check_hosts
from lowband.engine.transport.lane import Lanes, new_lanes
from lowband.engine.transport.order import Order
from lowband.spec.config import Config
from lowband.spec.mesh import Hop, Joined, Levels, Ring

_TOPOLOGIES = itertools.count()


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

    @property
    def is_ring(self) -> bool:
        return isinstance(self.joined, Ring)

    @property
    def places(self) -> list[int]:
        """By partner, which of the equal parts of a buffer is its."""
        return list(range(self.hop.count)) if self.joined is None else self.joined.places

    @property
    def place(self) -> int:
        """Which of the partners' equal parts of a buffer is this rank's."""
        return self.places[self.coordinate]

    @property
    def reorders(self) -> Joined | None:
        """The hops, if the back end moves parts in rank order and that is not the order of the shards."""
        is_reordered = self.joined is not None and self.back is None and len(self.joined.hops) > 1
        return self.joined if is_reordered else None

    def exchange(
        self, sent: Sequence[torch.Tensor | None], received: Sequence[torch.Tensor | None], name: str
    ) -> None:
        """On gloo: send sent[i] to partner i and receive received[i] from it. See transport.gloo.exchange."""
        assert self.back is not None
        partners = self.hop.partners(dist.get_rank())
        exchange(sent, received, partners, (self.group, self.back), name, self.times)

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


@dataclass
class Topology:
    """The levels of this job's ranks, their process groups and their lanes.

    inner: sizes of the levels inside the world, inner to outer, e.g. {"package": 2, "node": 8}

    Modules in one program may share a topology: their collectives then have one order. torch.distributed must
    be initialised; groups inherit the timeout of its default group. Every rank must build the same
    topologies in the same order, because building one creates process groups. Raises UserError if the ranks
    do not fill whole groups, differ in the levels' sizes, or are not numbered host after host.
    """

    inner: Mapping[str, int]
    levels: Levels = field(init=False)
    rank: int = field(init=False)
    _groups: dict[str, BoundHop] = field(init=False, default_factory=dict)
    _joined: dict[Joined, BoundHop] = field(init=False, default_factory=dict)  # and rings
    _lanes: dict[torch.device, Lanes] = field(init=False, default_factory=dict)
    _device_meshes: dict[str, DeviceMesh] = field(init=False, default_factory=dict)
    _calls: "itertools.count[int]" = field(init=False, default_factory=itertools.count)
    message_times: MessageTimes = field(init=False, default_factory=MessageTimes)  # on gloo, but for rings
    order: Order = field(init=False, default_factory=lambda: Order(next(_TOPOLOGIES)))

    def __post_init__(self) -> None:
        self.levels = Levels.fit(self.inner, dist.get_world_size())
        if not is_alone():
            check_hosts(check_same({"sizes of levels": dict(self.inner)}), self.levels)
        self.rank = dist.get_rank()
        for hop in self.levels.hops("self", "world"):
            self._groups[hop.level] = self._bound(hop)

    @classmethod
    def from_cluster(cls, name: str, root: Path = Path()) -> "Topology":
        """The levels of `slurm/<name>/machine.yaml` in `root` (default: working directory), or built in."""
        return cls(Config(root).machine(name).sizes)

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

    def device_mesh(self, device_type: str) -> DeviceMesh:
        """torch's view of the same ranks, for DTensor and code that is built on it.

        One dimension per level with more than one partner, named after it, outermost first; only ["world"]
        for a single rank. Its groups have the job's timeout and carry none of the engine's messages. Every
        rank must call this, because the first call for a device type creates process groups.
        """
        if device_type not in self._device_meshes:
            self._device_meshes[device_type] = self._new_device_mesh(device_type)
        return self._device_meshes[device_type]

    def _new_device_mesh(self, device_type: str) -> DeviceMesh:
        hops = self.levels.hops("self", "world")[::-1]
        if not hops:
            return init_device_mesh(device_type, (1,), mesh_dim_names=("world",))
        ranks = torch.arange(self.levels.world).view([hop.count for hop in hops])
        groups = [self._new_group(hop) for hop in hops]
        return DeviceMesh.from_group(
            groups if len(groups) > 1 else groups[0],
            device_type,
            ranks,
            mesh_dim_names=tuple(hop.level for hop in hops),
        )

    def lanes(self, device: torch.device) -> Lanes:
        """The lanes for tensors on a device; every call returns the same ones."""
        if device not in self._lanes:
            self._lanes[device] = new_lanes(self.levels.names, device)
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
        group = self._new_group(hop)
        back = self._new_group(hop) if dist.get_backend(group) == "gloo" else None
        return BoundHop(hop, group, hop.coordinate(self.rank), back, self.message_times)

    def _new_group(self, hop: Hop) -> dist.ProcessGroup:
        """A new group even if it has all ranks: the default group carries messages of other code."""
        mine = None
        for rank in range(self.levels.world):
            if hop.coordinate(rank) == 0:
                partners = hop.partners(rank)
                group = dist.new_group(partners, timeout=world_timeout())
                if self.rank in partners:
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
