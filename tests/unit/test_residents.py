"""Which weights stay on the device: as few fetches as any choice can have, where shards are of one size."""

import itertools
import random

import pytest

from lowband.cost.residents import Access, fetched, step_order


def least(order: list[tuple[int, Access]], capacity: int) -> int:
    """Of all choices of what stays behind each access, by trying them; chunks of size 1."""
    states = {frozenset[int](): 0}
    for unit, access in order:
        following: dict[frozenset[int], int] = {}
        for held, cost in states.items():
            paid = cost + (access != "new" and unit not in held)
            every = (held - {unit}) | {unit}
            for count in range(min(capacity, len(every)) + 1):
                for chosen in map(frozenset, itertools.combinations(every, count)):
                    following[chosen] = min(paid, following.get(chosen, paid))
        states = following
    return min(states.values())


@pytest.mark.parametrize("units", [2, 3, 4])
@pytest.mark.parametrize("passed", [1, 2, 3])
def test_no_choice_fetches_less(units: int, passed: int) -> None:
    for capacity in range(units + 1):
        forwards, backwards = [passed] * units, [0, *[passed] * (units - 1)]
        order = step_order(forwards, backwards)
        found = fetched(order, [1] * units, capacity)
        assert sum(found.values()) == least(order, capacity), (capacity, order)
        if capacity == units:
            assert sum(found.values()) == 0
    nothing = fetched(order, [1] * units, 0)
    assert (nothing.get("forward", 0), nothing["backward"]) == (units * (passed - 1), (units - 1) * passed)


def test_orders_of_other_models() -> None:
    rng = random.Random(0)
    for _ in range(40):
        units = rng.randint(2, 4)
        order: list[tuple[int, Access]] = [(unit, "new") for unit in range(units)]
        order += [(rng.randrange(units), "backward") for _ in range(rng.randint(2, 8))]
        for capacity in range(units):
            assert sum(fetched(order, [1] * units, capacity).values()) == least(order, capacity)
