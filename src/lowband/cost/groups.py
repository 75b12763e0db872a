"""Process groups and connections of a job in closed form.

A topology makes, for every hop between neighbouring levels, one group for each set of partners; on gloo two,
one for each direction of messages (engine/transport/gloo.py). torch.distributed's default group comes on top.
In a gloo group every rank is connected to every other.
"""

from typing import NamedTuple

from lowband.spec.mesh import SELF, WORLD, Levels


class Groups(NamedTuple):
    """With the default group. made: in the whole job; joined: by one rank; connections: of one rank."""

    made: int
    joined: int
    connections: int


def process_groups(levels: Levels, backend: str) -> Groups:
    """The groups of a job with one topology. connections: 0 on back ends other than gloo."""
    hops, copies = levels.hops(SELF, WORLD), 2 if backend == "gloo" else 1
    made = sum(copies * levels.world // hop.count for hop in hops)
    connections = sum(copies * (hop.count - 1) for hop in hops) + levels.world - 1
    return Groups(1 + made, 1 + copies * len(hops), connections if backend == "gloo" else 0)
