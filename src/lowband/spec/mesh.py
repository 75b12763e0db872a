"""Ranks, the axes of parallelism on which they lie, and the levels of the machine that each axis crosses.

A rank is a mixed-radix number. Each digit counts along one axis and crosses the links of one level:

    16 ranks, tensor 2 x data 4 x pipeline 2, on nodes of 8       rank = t + 2 d + 8 p
    Digit(tensor, node, 2, stride 1)  Digit(data, node, 4, stride 2)  Digit(pipeline, world, 2, stride 8)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise
from math import prod
from typing import Final, TypeVar

from lowband.errors import UserError
from lowband.spec.tiers import TIERS

_Name = TypeVar("_Name", bound=str)

SELF: Final = "self"  # the level of one rank
WORLD: Final = "world"  # the level of all ranks

# Of a job or a level. The largest known jobs have some 10^5 ranks; nothing here was compared with as many.
MOST_RANKS: Final = 2**20


@dataclass(frozen=True)
class Hop:
    """One collective's step between two neighbouring levels.

    level:  the outer of the two; the hop's messages travel on that level's links
    count:  partners in a group
    stride: ranks between neighbouring partners
    """

    level: str
    count: int
    stride: int

    def partners(self, rank: int) -> list[int]:
        """The group of `rank`, in order of coordinate."""
        block = self.stride * self.count
        base = rank // block * block + rank % self.stride
        return [base + i * self.stride for i in range(self.count)]

    def coordinate(self, rank: int) -> int:
        """The place of `rank` in its group."""
        return rank // self.stride % self.count


@dataclass(frozen=True)
class Joined:
    """Several hops of one collective as a single one: each of all their partners sends to every other.

    hops: inner first, at least one
    """

    hops: tuple[Hop, ...]

    @property
    def hop(self) -> Hop:
        """All their ranks as the partners of one hop, on the outermost level."""
        return Hop(self.hops[-1].level, prod(hop.count for hop in self.hops), self.hops[0].stride)

    @cached_property
    def places(self) -> list[int]:
        """By partner, which of the equal parts of a buffer is its shard (see spec.partition)."""
        places = [0]
        for hop in self.hops:
            places = [place * hop.count + i for i in range(hop.count) for place in places]
        return places

    def shares(self, _rank: int | None) -> dict[str, Fraction]:
        """By level, the part of a rank's bytes that travels on its links; the same for every rank, because
        each sends as much to every partner."""
        found, inside = {}, 1
        for hop in self.hops:
            found[hop.level] = Fraction((hop.count - 1) * inside, self.hop.count - 1)
            inside *= hop.count
        return found


@dataclass(frozen=True)
class Ring(Joined):
    """Several hops of one collective as a single ring over all their partners, in rank order.

    A rank sends to its successor alone; the last rank's is the first.
    """

    def level(self, rank: int) -> str:
        """The level whose links lead from `rank` to its successor: the innermost that contains both."""
        inside = (hop.level for hop in self.hops if hop.coordinate(rank) < hop.count - 1)
        return next(inside, self.hops[-1].level)

    @cached_property
    def senders(self) -> dict[str, int]:
        """By level, the number of the ring's ranks whose messages travel on its links."""
        found, outside = {}, self.hop.count
        for hop in self.hops:
            outside //= hop.count
            found[hop.level] = (hop.count - 1) * outside
        found[self.hops[-1].level] += 1  # the last rank's successor is the first
        return found

    def shares(self, rank: int | None) -> dict[str, Fraction]:
        """By level, the part of a rank's bytes that travels on its links: all or nothing; None: the mean."""
        if rank is None:
            return {level: Fraction(count, self.hop.count) for level, count in self.senders.items()}
        return {hop.level: Fraction(hop.level == self.level(rank)) for hop in self.hops}


@dataclass(frozen=True)
class Levels:
    """Level names and sizes (ranks in one group), from `self` (1) out to `world` (all ranks).

    stride: between neighbouring ranks; more than 1 where another axis of parallelism lies inside this one
    """

    names: tuple[str, ...]
    sizes: tuple[int, ...]
    stride: int = 1

    @classmethod
    def fit(cls, inner: Mapping[str, int], world: int) -> "Levels":
        """Levels of `world` ranks. A level larger than the world is cut to it: 4 ranks fill half a node of 8.

        inner: sizes of the levels inside the world, inner to outer
        Raises UserError if the ranks do not fill whole groups.
        """
        if world < 1:
            raise UserError(f"{world} ranks", allowed="1 or more")
        if any(size < 1 for size in inner.values()) or {SELF, WORLD, *TIERS} & set(inner):
            raise UserError(
                f"inner levels {dict(inner)}",
                allowed=f"sizes of 1 or more; names other than {', '.join((SELF, WORLD, *TIERS))}",
            )
        names = (SELF, *inner, WORLD)
        sizes = (1, *(min(size, world) for size in inner.values()), world)
        for (name_in, in_), (name_out, out) in pairwise(zip(names, sizes, strict=True)):
            if out % in_:
                raise UserError(
                    f"{world} ranks do not fit the levels: '{name_out}' ({out}) is not a multiple of "
                    f"'{name_in}' ({in_})",
                    allowed=f"rank counts that fill whole groups of {dict(inner)}",
                )
        return cls(names, sizes)

    @property
    def world(self) -> int:
        return self.sizes[-1]

    def index(self, level: str) -> int:
        """Position of a level, 0 for `self`. Raises UserError for an unknown level."""
        if level not in self.names:
            raise UserError(f"no level '{level}'", allowed=self.names)
        return self.names.index(level)

    def size(self, level: str) -> int:
        return self.sizes[self.index(level)]

    def common(self, rank: int, other: int) -> str:
        """The innermost level with a group that contains both ranks, which lie along this axis."""
        blocks = ((name, self.stride * size) for name, size in zip(self.names, self.sizes, strict=True))
        return next(name for name, block in blocks if rank // block == other // block)

    def hops(self, inner: str, outer: str) -> Sequence[Hop]:
        """The steps from one level out to another, inner first; steps with a single partner are left out."""
        steps = self._steps[self.index(inner) : self.index(outer)]
        return [hop for hop in steps if hop.count > 1]

    @cached_property
    def _steps(self) -> tuple[Hop, ...]:
        """From each level to the next one out."""
        return tuple(
            Hop(level, size // inside, self.stride * inside)
            for level, (inside, size) in zip(self.names[1:], pairwise(self.sizes), strict=True)
        )

    def ring(self, inner: str, outer: str) -> Ring | None:
        """The same steps as one ring; None if there are none."""
        hops = self.hops(inner, outer)
        return Ring(tuple(hops)) if hops else None

    def joined(self, inner: str, outer: str) -> Joined | None:
        """The same steps joined to one; None if there are none."""
        hops = self.hops(inner, outer)
        return Joined(tuple(hops)) if hops else None


@dataclass(frozen=True)
class Digit:
    """count: ranks along `axis` inside one group of `level`; stride: ranks between neighbours"""

    axis: str
    level: str
    count: int
    stride: int


@dataclass(frozen=True)
class Mesh:
    """The axes of a job's ranks. names: the levels' names, from `self` to `world`; digits: inner to outer."""

    names: tuple[str, ...]
    digits: tuple[Digit, ...]

    @classmethod
    def fit(cls, inner: Mapping[str, int], degrees: Mapping[_Name, int]) -> "Mesh":
        """Axes laid out one after the other, each filling the levels from the inside.

        inner:   sizes of the levels inside the world, inner to outer
        degrees: axis -> ranks along it, innermost axis first
        Raises UserError for an axis that does not fill whole groups of a level.
        """
        return cls._fit(tuple(inner.items()), tuple(degrees.items()))

    @classmethod
    @lru_cache(maxsize=1024)  # a search asks for the same ones in every schedule
    def _fit(cls, inner: tuple[tuple[str, int], ...], degrees: tuple[tuple[str, int], ...]) -> "Mesh":
        digits: list[Digit] = []
        placed: list[str] = []
        stride = 1
        for axis, degree in degrees:
            left = degree
            for name, size in inner:
                if left > 1 and size > stride and size % stride:
                    inside = " x ".join(placed) or f"a level of {stride}"
                    raise UserError(f"{inside} does not divide level '{name}' of {size}")
                count = min(left, max(1, size // stride))
                if left % count:
                    raise UserError(f"{axis} {degree} does not fill whole groups of level '{name}' of {size}")
                if count > 1:
                    digits.append(Digit(axis, name, count, stride))
                stride, left = stride * count, left // count
            if left > 1:
                digits.append(Digit(axis, WORLD, left, stride))
            stride *= left
            placed += [f"{axis} {degree}"] if degree > 1 else []
        return cls((SELF, *dict(inner), WORLD), tuple(digits))

    def along(self, axis: str) -> list[Digit]:
        """The digits of an axis, inner first; none for an axis of one rank."""
        return [digit for digit in self.digits if digit.axis == axis]

    def levels(self, axis: str) -> Levels:
        """The levels as the ranks along an axis see them."""
        digits, size, sizes = self.along(axis), 1, []
        for name in self.names:
            for digit in digits:
                size *= digit.count if digit.level == name else 1
            sizes.append(size)
        return Levels(self.names, tuple(sizes), digits[0].stride if digits else 1)

    def group(self, axis: str, rank: int) -> list[int]:
        """The ranks that differ from `rank` along `axis` alone, in order."""
        ranks = [rank]
        for digit in self.along(axis):
            ranks = [
                base + (i - base // digit.stride % digit.count) * digit.stride
                for i in range(digit.count)
                for base in ranks
            ]
        return sorted(ranks)
