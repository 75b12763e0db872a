"""The layout of a box: names and addresses of ranks, bridges and rates of links. Pure arithmetic.

[Note: the network of a box] Each rank has a network namespace. A group of ranks (a package, a node) is a
bridge, and one link leads from it to the bridge of the enclosing group; the outermost bridge connects the
nodes. The link from a group of level i-1 to its group of level i has a queue at both ends, with the rate

    ranks in the group x rate of level i's link / scale

so a single rank may use bandwidth that its neighbours leave, and all ranks together get the machine's rate.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from lowband.cost.tcp import FRAME_BYTES, PAYLOAD_BYTES
from lowband.spec.machine import Machine
from lowband.spec.mesh import SELF, Levels

HEAD_ADDRESS = "10.77.0.254"  # of Slurm's controller; traffic to and from it is not shaped
PREFIX = "lowband-"  # of every namespace that a box makes, and of no others
NODE = "node"  # followed by a number from 1: a node's name in Slurm and its host name
FABRIC = f"{PREFIX}fabric"  # the namespace of all bridges


@dataclass(frozen=True)
class Place:
    """The place of a rank: its slot (from 0) on its node (from 1)."""

    node: int
    slot: int

    @property
    def namespace(self) -> str:
        return f"{PREFIX}node{self.node}g{self.slot}"

    @property
    def address(self) -> str:
        return f"10.77.{self.node}.{10 + self.slot}"


@dataclass(frozen=True)
class UpLink:
    """The link from one group to the enclosing group.

    level:      level of the outer group, which determines the rate
    inner:      bridge of the inner group; for a single rank its port (`eth0` in the rank's namespace)
    outer:      bridge of the outer group
    rank:       the rank, if this is a rank's own link; otherwise None
    bits_per_s: rate of the queues at both ends, which count whole frames
    """

    level: str
    inner: str
    outer: str
    rank: int | None
    bits_per_s: int


@dataclass(frozen=True)
class Layout:
    """The network of `levels.world` ranks of a machine that has a box."""

    machine: Machine
    levels: Levels

    @classmethod
    def of(cls, machine: Machine, ranks: int) -> "Layout":
        """Raises UserError if the ranks do not fill whole groups."""
        return cls(machine, Levels.fit(machine.sizes, ranks))

    @property
    def node_size(self) -> int:
        """Ranks per node."""
        return self.levels.sizes[-2]

    @property
    def nodes(self) -> int:
        return self.levels.world // self.node_size

    def place(self, rank: int) -> Place:
        """The place of a rank: ranks fill one node after the other."""
        return Place(rank // self.node_size + 1, rank % self.node_size)

    def places(self) -> list[Place]:
        return [self.place(rank) for rank in range(self.levels.world)]

    def bridges(self) -> list[str]:
        """Names of the groups' bridges, inner levels first."""
        return [
            _bridge(level, group)
            for level, size in enumerate(self.levels.sizes)
            if level > 0
            for group in range(self.levels.world // size)
        ]

    def up_links(self) -> Iterator[UpLink]:
        """Every link of the box, inner levels first."""
        for level in range(1, len(self.levels.names)):
            inside, around = self.levels.sizes[level - 1], self.levels.sizes[level]
            bits_per_s = round(inside * self.bytes_per_s(level) * 8 * FRAME_BYTES / PAYLOAD_BYTES)
            for group in range(self.levels.world // inside):
                yield UpLink(
                    level=self.levels.names[level],
                    inner=_bridge(level - 1, group),
                    outer=_bridge(level, group * inside // around),
                    rank=group if self.levels.names[level - 1] == SELF else None,
                    bits_per_s=bits_per_s,
                )

    def bytes_per_s(self, level: int) -> float:
        """Scaled rate at which one rank sends to a partner over a level's links while all ranks send."""
        box, link = self.machine.box, self.machine.levels[level - 1].link
        assert box is not None  # a box's levels all have links (spec.machine)
        assert link is not None
        return link.gigabytes_per_s * 1e9 / box.scale


def _bridge(level: int, group: int) -> str:
    return f"l{level}.{group}"  # short: the kernel allows 15 characters
