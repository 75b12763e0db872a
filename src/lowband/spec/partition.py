"""Who owns which slice of a unit: pure arithmetic, no messages.

A unit's parameters are concatenated in one flat buffer, padded so that every level cuts it into
equal parts. The innermost level cuts first: its coordinate is the most significant. Hence the shard of an
outer level is a contiguous part of the shard of every inner level, a reduce-scatter goes inner to outer
with ever smaller pieces, and the slowest link carries the smallest ones.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from lowband.spec.mesh import SELF, Levels

# Elements. Every parameter and every shard starts at a multiple of this, so that a block of up to that many
# values never mixes parameters: a bias of 0.001 in one block with a norm's weights of 1.0 would share their
# scale and be sent as zero. Vector loads, cuBLAS and NCCL also want this alignment.
ALIGN = 256
# Elements that an exchange receives at once, of all partners together: 8 MiB in fp32. A whole bucket would
# need as much memory again, and the fewer the pieces, the less time they take.
AT_ONCE = 2**21


def pieces(numel: int, partners: int) -> list[tuple[int, int]]:
    """Where rows of `numel` elements, one from each of so many partners, are cut to be received in turns:
    as seldom as AT_ONCE allows, and evenly."""
    count = max(math.ceil(numel * partners / AT_ONCE), 1)
    width = max(round_up(math.ceil(numel / count), ALIGN), ALIGN)
    return [(start, min(start + width, numel)) for start in range(0, max(numel, 1), width)]


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class UnitLayout:
    """Positions of a unit's parameters in its flat buffer.

    shapes:  per parameter
    offsets: first element of each parameter
    numel:   elements of the buffer, padding included
    """

    shapes: tuple[tuple[int, ...], ...]
    offsets: tuple[int, ...]
    numel: int

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]], world: int) -> "UnitLayout":
        """Layout for shards over up to `world` ranks."""
        offsets, end = [], 0
        for shape in shapes:
            offsets.append(end)
            end += round_up(math.prod(shape), ALIGN)
        return cls(tuple(shapes), tuple(offsets), max(round_up(end, ALIGN * world), ALIGN * world))

    def ranges(self) -> list[tuple[int, int]]:
        """Per parameter: first and last-plus-one element."""
        return self._ranges

    def spans(self) -> list[tuple[int, int]]:
        """Per parameter: first and last-plus-one element, with padding after it; covers the buffer."""
        return self._spans

    @cached_property
    def _ranges(self) -> list[tuple[int, int]]:
        return [(o, o + math.prod(s)) for o, s in zip(self.offsets, self.shapes, strict=True)]

    @cached_property
    def _spans(self) -> list[tuple[int, int]]:
        return list(pairwise((*self.offsets, self.numel)))


def shard_range(numel: int, levels: Levels, level: str, rank: int) -> tuple[int, int]:
    """First and last-plus-one element of `rank`'s shard of a buffer that is sharded over `level`.

    numel: elements of the whole buffer, a multiple of the level's size
    """
    start, length = 0, numel
    for hop in levels.hops(SELF, level):
        length //= hop.count
        start += hop.coordinate(rank) * length
    return start, start + length


def shard_ranks(levels: Levels, level: str, rank: int) -> list[int]:
    """The ranks that together with `rank` hold a buffer sharded over `level`, in order of their shards."""
    ranks = [rank]
    for hop in levels.hops(SELF, level):
        ranks = [partner for each in ranks for partner in hop.partners(each)]
    return sorted(ranks, key=lambda each: shard_range(len(ranks), levels, level, each))


def intersect(a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """Common part of two ranges; empty (start == stop) if there is none."""
    start = max(a[0], b[0])
    return start, max(start, min(a[1], b[1]))
