"""Ranks to process groups: one group per hop between neighbouring levels."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from lowband.spec.machine import Hop, Levels, read_machine


@dataclass(frozen=True)
class BoundHop:
    """A hop together with this rank's process group for it.

    [Note: pairs on gloo] Between two ranks of a group gloo moves one direction at a time. So a hop between
    two has a second group of the same ranks, and each direction a connection of its own: half the time on a
    link.
    """

    hop: Hop
    group: dist.ProcessGroup
    coordinate: int
    back: dist.ProcessGroup | None  # of a pair on gloo: for what the second sends to the first

    def swap(self, mine: torch.Tensor, theirs: torch.Tensor) -> None:
        """Send `mine` to the partner of a pair on gloo and receive `theirs`, both at once."""
        out, back = (self.group, self.back) if self.coordinate == 0 else (self.back, self.group)
        partner = self.hop.partners(dist.get_rank())[1 - self.coordinate]
        receiving = dist.irecv(theirs, partner, group=back)
        sending = dist.isend(mine, partner, group=out)
        for work in (receiving, sending):
            if work is not None:
                work.wait()


@dataclass
class Topology:
    """The levels of this job's ranks and their process groups.

    inner: sizes of the levels inside the world, inner to outer, e.g. {"package": 2, "node": 8}

    torch.distributed must be initialised. Every rank must build the same topologies in the same order,
    because building one creates process groups. Raises UserError if the ranks do not fill whole groups.
    """

    inner: Mapping[str, int]
    levels: Levels = field(init=False)
    rank: int = field(init=False)
    _groups: dict[str, BoundHop] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.levels = Levels.fit(self.inner, dist.get_world_size())
        self.rank = dist.get_rank()
        for hop in self.levels.hops("self", "world"):
            group = self._new_group(hop)
            is_gloo_pair = hop.count == 2 and dist.get_backend(group) == "gloo"
            back = self._new_group(hop, is_second=True) if is_gloo_pair else None
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


def default_device(backend: str | None = None) -> torch.device:
    """The device that this rank's backend moves data on."""
    backend = backend or dist.get_backend()
    return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
