"""Which cases of a product `make test` runs: every two values that meet in any case meet in one of these.

Where a case takes seconds, size 1: every value is in one of them.
"""

from collections.abc import Hashable, Iterable, Sequence
from functools import reduce
from itertools import combinations
from operator import or_
from typing import Any

import pytest

Case = tuple[Hashable, ...]  # a value of each axis


def pairs(case: Case, size: int = 2) -> set[Any]:
    """Two values, each with the number of its axis; of one axis each value alone. size: how many values"""
    return set(combinations(enumerate(case), min(size, len(case))))


def covering(cases: Sequence[Case], size: int = 2) -> set[Case]:
    """A few of the cases that hold all pairs of all; the same ones each time. size: 1: all values

    The case that holds most of what is still missing is taken next, of equal ones that with the most new
    pairs, of these the first.
    """
    bits: dict[Any, int] = {}  # a set of pairs is the sum of theirs: tens of thousands are compared

    def of(found: set[Any]) -> int:
        return sum(bits.setdefault(pair, 1 << len(bits)) for pair in found)

    wanted = {case: of(pairs(case, size)) for case in cases}
    held = {case: of(pairs(case)) for case in cases}
    chosen: set[Case] = set()
    missing, new = (reduce(or_, sets.values(), 0) for sets in (wanted, held))
    while missing:
        best = max(
            wanted, key=lambda case: ((wanted[case] & missing).bit_count(), (held[case] & new).bit_count())
        )
        chosen.add(best)
        missing &= ~wanted[best]
        new &= ~held[best]
    return chosen


def pairwise(cases: Iterable[Case], size: int = 2) -> list[Any]:
    """For pytest.mark.parametrize: all cases, those that no pair (size 1: no value) needs marked `wide`."""
    cases = list(cases)
    chosen = covering(cases, size)
    return [case if case in chosen else pytest.param(*case, marks=pytest.mark.wide) for case in cases]
