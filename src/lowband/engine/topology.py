"""Ranks to process groups: one group per hop between neighbouring levels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from lowband.engine.agree import check_same, is_alone
from lowband.spec.machine import Hop, Levels, read_machine


@dataclass(frozen=True)
class BoundHop:
    """A hop together with this rank's process group for it.

    [Note: pairs on gloo] Between two ranks of a group gloo moves one direction at a time. So a hop has a
    second group of the same ranks: what a rank sends to a later one goes through the first, the rest through
    the second, and each direction has a connection of its own.
    """

    hop: Hop
    group: dist.ProcessGroup
    coordinate: int
    back: dist.ProcessGroup | None  # on gloo: for what a rank sends to an earlier one

    def exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        """On gloo: send sent[i] to partner i and receive received[i] from it, all at once.

        The own places of both stay as they are. What lies on a GPU goes through the CPU: gloo's sends
        read host memory.
        """
        if received[0].is_cuda:
            arrived = [torch.empty_like(tensor, device="cpu") for tensor in received]
            self.exchange([tensor.cpu() for tensor in sent], arrived)
            for i, tensor in enumerate(arrived):
                if i != self.coordinate:
                    received[i].copy_(tensor)
            return
        works = []
        for i, partner in enumerate(self.hop.partners(dist.get_rank())):
            if i != self.coordinate:
                out, back = (self.group, self.back) if self.coordinate < i else (self.back, self.group)
                works += [
                    dist.irecv(received[i], partner, group=back),
                    dist.isend(sent[i], partner, group=out),
                ]
        for work in works:
            if work is not None:
                work.wait()


@dataclass
class Topology:
    """The levels of this job's ranks and their process groups.

    inner: sizes of the levels inside the world, inner to outer, e.g. {"package": 2, "node": 8}

    torch.distributed must be initialised. Every rank must build the same topologies in the same order,
    because building one creates process groups. Raises UserError if the ranks do not fill whole groups, or
    differ in the levels' sizes.
    """

    inner: Mapping[str, int]
    levels: Levels = field(init=False)
    rank: int = field(init=False)
    _groups: dict[str, BoundHop] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.levels = Levels.fit(self.inner, dist.get_world_size())
        if not is_alone():
            check_same({"sizes of levels": dict(self.inner)})
        self.rank = dist.get_rank()
        for hop in self.levels.hops("self", "world"):
            group = self._new_group(hop)
            is_gloo = dist.get_backend(group) == "gloo"
            back = self._new_group(hop, is_second=True) if is_gloo else None
            self._groups[hop.level] = BoundHop(hop, group, hop.coordinate(self.rank), back)

    @classmethod
    def from_cluster(cls, name: str, root: Path | None = None) -> "Topology":
        """The levels of `slurm/<name>/machine.yaml` under `root` (default: the working directory)."""
        return cls(read_machine(root or Path.cwd(), name).sizes)

    def hops(self, inner: str, outer: str) -> list[BoundHop]:
        """The steps from one level out to another, inner first, with this rank's groups."""
        return [self._groups[hop.level] for hop in self.levels.hops(inner, outer)]

    def _new_group(self, hop: Hop, is_second: bool = False) -> dist.ProcessGroup:
        if hop.count == self.levels.world and not is_second:
            return dist.group.WORLD  # type: ignore[return-value]
        mine = None
        for rank in range(self.levels.world):
            if hop.coordinate(rank) == 0:
                partners = hop.partners(rank)
                group = dist.new_group(partners)
                if self.rank in partners:
                    mine = group
        assert mine is not None
        return mine
