"""Tokens of a sequence over the ranks along context: which are whose, and how ranks attend, level by level.

    heads    an all-to-all: a rank gets all tokens of some heads                  inside
    gather   keys and values of all ranks are gathered on each
    ring     keys and values travel from rank to rank, one block at a time        outside

Ranks that differ on levels of `heads` alone share one part of the sequence; there are as many parts as ranks
on the other levels. With zigzag part i of n is the pieces i and 2 n - 1 - i of 2 n, so that under a causal
mask all parts have equally many pairs of a query and a key; without it the last has 2 n - 1 times as many as
the first.

Source: DeepSpeed Ulysses (arXiv 2309.14509), Llama 3 (arXiv 2407.21783, section 3.3.2), ring attention
(arXiv 2310.01889), USP (arXiv 2405.07719).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from math import lcm, prod
from typing import Final, Literal, get_args

from lowband.errors import UserError
from lowband.spec.axes import Axes
from lowband.spec.mesh import SELF, WORLD, Levels
from lowband.spec.scheme import Scheme

Way = Literal["heads", "gather", "ring"]
WAYS: Final[tuple[Way, ...]] = get_args(Way)  # in the order in which they may lie, inner to outer

Run = tuple[int, int]  # positions of neighbouring tokens: first and last-plus-one


def ways_of(attention: str | Mapping[str, str], levels: Levels) -> dict[str, Way]:
    """By level that context ranks cross, inner to outer, how they attend.

    attention: a way for all levels; or by level, as a mapping or as text, `package=heads,world=ring`
    levels:    as the ranks along context see them
    Raises UserError for an unknown way or level, for a level without one, and for another order than heads
    inside, then gather, then ring.
    """
    where = "context_attention"
    crossed = [hop.level for hop in levels.hops(SELF, WORLD)]
    if isinstance(attention, str) and "=" not in attention:
        given: Mapping[str, str] = dict.fromkeys(crossed or [WORLD], attention)
    elif isinstance(attention, str):
        pairs = [part.strip().partition("=") for part in attention.split(",")]
        given = {level: way for level, _, way in pairs}
    else:
        given = attention
    for level, way in given.items():
        levels.index(level)
        if way not in WAYS:
            raise UserError(f"unknown way '{way}'", where=where, allowed=WAYS)
    if missing := [level for level in crossed if level not in given]:
        what = f"no way for level '{missing[0]}', which context ranks cross"
        raise UserError(what, where=where, allowed=WAYS)
    found: dict[str, Way] = {level: given[level] for level in crossed}  # type: ignore[misc]
    for (inner, a), (outer, b) in pairwise(found.items()):
        if WAYS.index(a) > WAYS.index(b):
            what = f"{a} on '{inner}' lies inside of {b} on '{outer}'"
            raise UserError(what, where=where, allowed="from the inside: heads, gather, ring")
    return found


def check_context(axes: Axes, scheme: Scheme, levels: Levels) -> None:
    """Raises UserError if ranks along context would be of different replicas, whose weights differ.

    levels: as the ranks along data see them
    """
    if axes.context > 1 and scheme.sync is not None and levels.size(scheme.sync.beyond) % axes.context:
        raise UserError(
            f"context {axes.context} crosses replicas, the groups of level '{scheme.sync.beyond}'",
            where=f"scheme '{scheme.name}'",
            allowed=f"what divides {levels.size(scheme.sync.beyond)}, the ranks of a replica",
        )


@dataclass(frozen=True)
class Layout:
    """Which tokens are whose. levels: as ranks along context see them; ways: by level that they cross"""

    levels: Levels
    ways: Mapping[str, Way]
    zigzag: bool

    def ranks(self, way: Way) -> int:
        """Ranks in a group of those that attend so."""
        hops = self.levels.hops(SELF, WORLD)
        return prod(hop.count for hop in hops if self.ways[hop.level] == way)

    def span(self, way: Way) -> tuple[str, str]:
        """The levels between which ranks attend so, inner and outer."""
        ends, at = {}, SELF
        for each in WAYS:
            start, at = at, [at, *(level for level, found in self.ways.items() if found == each)][-1]
            ends[each] = start, at
        return ends[way]

    @property
    def parts(self) -> int:
        """Of the sequence."""
        return self.ranks("gather") * self.ranks("ring")

    @property
    def multiple(self) -> int:
        """Tokens of a sequence are padded to a multiple of this."""
        return self.parts * lcm(2 if self.zigzag and self.parts > 1 else 1, self.ranks("heads"))

    def padded(self, length: int) -> int:
        return -(-length // self.multiple) * self.multiple

    def runs(self, part: int, length: int) -> list[Run]:
        """The tokens of a part, in its order. length: of the sequence, a multiple of `multiple`"""
        n = self.parts
        if n == 1 or not self.zigzag:
            piece = length // n
            return [(part * piece, (part + 1) * piece)]
        piece = length // (2 * n)
        return [(i * piece, (i + 1) * piece) for i in (part, 2 * n - 1 - part)]

    def balance(self, length: int) -> Fraction:
        """Pairs of a query and a key under a causal mask: the mean of parts over those of the part with most.

        1 with zigzag; without it about n / (2 n - 1) for n parts. length: a multiple of `multiple`
        """
        of_parts = [
            sum(last * (last + 1) - first * (first + 1) for first, last in self.runs(part, length))
            for part in range(self.parts)
        ]
        return Fraction(sum(of_parts), self.parts * max(of_parts))

    def positions(self, place: int, length: int) -> Sequence[int]:
        """The tokens of the rank of that number along context, in its order."""
        part, of_heads = divmod(place, self.ranks("heads"))
        tokens = [position for run in self.runs(part, length) for position in range(*run)]
        mine = len(tokens) // self.ranks("heads")
        return tokens[of_heads * mine : (of_heads + 1) * mine]
