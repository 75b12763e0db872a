"""Where everything in a box is: names and addresses of ranks, bridges, queues. Pure arithmetic.

[Note: the network of a box] Each rank has a network namespace. A group of ranks (a package, a node) is a
bridge, and one link leads from it to the bridge of the group around it; the outermost bridge joins the
nodes. The link from a group of level i-1 to its group of level i has a queue at either end, of the rate

    ranks in the group x rate of level i's link / scale

so a rank alone may use what its neighbours leave, and all together get what the machine's file says.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from lowband.cost.tcp import FRAME_BYTES, PAYLOAD_BYTES
from lowband.spec.machine import Machine
from lowband.spec.mesh import SELF, Levels

HEAD_ADDRESS = "10.77.0.254"  # of Slurm's controller; traffic to and from it is not shaped
PREFIX = "lowband-"  # of every namespace that a box makes, and of nothing else
NODE = "node"  # and a number from 1: the name of a node as Slurm and its host say it
FABRIC = f"{PREFIX}fabric"  # the namespace of all bridges


@dataclass(frozen=True)
class Place:
    """Where a rank is: its slot (from 0) on its node (from 1)."""

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
    """The link from one group to the group around it.

    level:      the outer group's level, whose link's rate it has
    inner:      bridge of the group, or of a rank its number's port (`eth0` in the rank's namespace)
    outer:      bridge that it leads to
    rank:       of a rank's own link, else None
    bits_per_s: of the queues at its ends, which count whole frames
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
        """Ranks of a node of this layout."""
        return self.levels.sizes[-2]

    @property
    def nodes(self) -> int:
        return self.levels.world // self.node_size

    def place(self, rank: int) -> Place:
        """Ranks fill one node after the other."""
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
        """What one rank sends to a partner over the links of a level, scaled, when all ranks send."""
        box, link = self.machine.box, self.machine.levels[level - 1].link
        assert box is not None  # a box's levels all have links (spec.machine)
        assert link is not None
        return link.gigabytes_per_s * 1e9 / box.scale


def _bridge(level: int, group: int) -> str:
    return f"l{level}.{group}"  # short: the kernel takes 15 characters
