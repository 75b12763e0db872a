"""Which cases of a product `make test` runs: every two values that meet in any case meet in one of these."""

from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
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
    chosen: set[Case] = set()
    met: set[Any] = set()
    missing = {case: pairs(case, size) for case in cases}
    while any(missing.values()):
        best = max(missing, key=lambda case: (len(missing[case]), len(pairs(case) - met)))
        chosen.add(best)
        met |= pairs(best)
        missing = {case: found - pairs(best, size) for case, found in missing.items()}
    return chosen


def pairwise(cases: Iterable[Case], size: int = 2) -> list[Any]:
    """For pytest.mark.parametrize: all cases, those that no pair (size 1: no value) needs marked `wide`."""
    cases = list(cases)
    chosen = covering(cases, size)
    return [case if case in chosen else pytest.param(*case, marks=pytest.mark.wide) for case in cases]
