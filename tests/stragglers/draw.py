"""A trial, drawn from a seed: a slow rank, a slow link, or neither, in which run."""

import random
from dataclasses import dataclass
from typing import Literal

from lowband.spec.mesh import SELF, WORLD, Levels

SCHEMES = ("zero3", "hpz", "zeropp", "hier3")
Kind = Literal["none", "rank", "link", "path"]
FAULTS: tuple[Kind, ...] = ("rank", "link", "path")
RANK, LINK = (1.3, 3.0), (2.0, 6.0)  # how many times slower: between these


@dataclass(frozen=True)
class Trial:
    """
    kind:   none | rank: its device is slow | link: a rank's own link | path: messages between two ranks
    node:   ranks of a node, in packages of two
    victim: the rank, or both ends of a path; none for `none`
    level:  of the path
    factor: how many times slower
    """

    seed: int
    kind: Kind
    scheme: str
    ranks: int
    node: int
    victim: tuple[int, ...]
    level: str
    factor: float


def levels(ranks: int, node: int) -> Levels:
    return Levels.fit({"package": 2, "node": node}, ranks)


def trial(seed: int, faulty: bool) -> Trial:
    """Faults take turns, so that any run of seeds has equally many of each; the rest is random."""
    rng = random.Random(f"{seed} {faulty}")
    ranks = rng.choice([4, 8])
    node = rng.choice([4, ranks])
    scheme = rng.choice(SCHEMES)
    if not faulty:
        return Trial(seed, "none", scheme, ranks, node, (), "", 1.0)
    kind = FAULTS[seed % len(FAULTS)]
    factor = round(rng.uniform(*(RANK if kind == "rank" else LINK)), 2)
    rank = rng.randrange(ranks)
    if kind != "path":
        return Trial(seed, kind, scheme, ranks, node, (rank,), "", factor)
    hop = rng.choice(levels(ranks, node).hops(SELF, WORLD))
    other = rng.choice([partner for partner in hop.partners(rank) if partner != rank])
    return Trial(seed, kind, scheme, ranks, node, tuple(sorted((rank, other))), hop.level, factor)
