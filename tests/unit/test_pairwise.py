"""The choice of cases that `make test` runs of a product."""

from itertools import combinations, product

import pytest
from _pytest.mark import ParameterSet

from tests.pairwise import covering, pairs, pairwise

AXES = [
    [range(11), range(4), "ab", "cd"],
    [range(3)] * 4,
    [range(2)] * 10,
    [range(5), range(4)],
    [range(7)],
]


def held(cases) -> set:
    return set().union(*map(pairs, cases))


@pytest.mark.parametrize("axes", AXES, ids=lambda axes: "x".join(str(len(axis)) for axis in axes))
def test_every_pair_of_values_is_in_a_chosen_case(axes) -> None:
    cases = list(product(*axes))
    chosen = covering(cases)
    assert chosen <= set(cases)
    for i, j in combinations(range(len(axes)), 2):
        assert {(case[i], case[j]) for case in chosen} == set(product(axes[i], axes[j]))
    assert {case[0] for case in chosen} == set(axes[0])


def test_pairs_that_no_case_holds_are_not_needed() -> None:
    cases = [case for case in product(range(4), repeat=3) if sorted(case) == list(case)]
    chosen = covering(cases)
    assert held(chosen) == held(cases)
    assert len(chosen) < len(cases)


def test_the_choice_is_small_and_the_same_each_time() -> None:
    cases = list(product(range(11), range(4), "ab", "cd"))
    assert covering(cases) == covering(cases)
    assert 44 <= len(covering(cases)) <= 48  # of 176; 11 x 4 pairs are of the two longest axes
    assert 9 <= len(covering(list(product(range(3), repeat=4)))) <= 15  # of 81


def test_the_others_are_wide() -> None:
    cases = list(product("ab", "cd", "ef"))
    found = pairwise(iter(cases))
    wide = {param.values for param in found if isinstance(param, ParameterSet)}
    assert wide == set(cases) - covering(cases) != set()
    assert all(param.marks == (pytest.mark.wide,) for param in found if isinstance(param, ParameterSet))
    assert [param.values if isinstance(param, ParameterSet) else param for param in found] == cases
