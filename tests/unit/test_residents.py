"""Which weights stay on the device: as few fetches as any choice can have, where shards are of one size."""

import itertools
import random

import pytest

from lowband.cost.residents import Access, Residents, fetched, step_order


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


def test_what_is_frozen_stays() -> None:
    """Of a root and a last unit that train and two between them, also behind a step that renews these."""
    trained = [(0, "new"), (1, "forward"), (2, "forward"), (3, "new")]
    backward = [(3, "backward"), (2, "backward"), (1, "backward")]
    for capacity, least_of_step in ((4, 0), (3, 0), (2, 1), (1, 3)):
        residents, found = Residents[int](capacity), []
        for number in range(10):
            fetches = 0
            for unit, access in (*trained, *backward):
                is_new = access == "new" or (number == 3 and access == "forward")
                fetches += not residents.access(unit, 1, is_new).was_there and not is_new
            found.append(fetches)
        assert found[-3:] == [least_of_step] * 3, (capacity, found)


def test_a_step_that_goes_another_way_leaves_nothing_useless() -> None:
    """Units that are evaluated between steps of training."""
    forward, backward = [(i, "new") for i in range(4)], [(i, "backward") for i in (3, 2, 1)]
    for capacity in range(1, 4):
        residents, found = Residents[int](capacity), []
        for number in range(8):
            between = [(i, "forward") for i in range(4)] if number == 2 else []
            accesses = [*forward, *between, *backward]
            found.append(sum(
                not residents.access(unit, 1, access == "new").was_there and access != "new"
                for unit, access in accesses
            ))  # fmt: skip
        assert found[-3:] == [3 - capacity] * 3, (capacity, found)


def test_two_optimizers_in_turns() -> None:
    """What is renewed amid a step stays behind it, where there is room."""
    order: list[tuple[int, Access]] = [(0, "new"), (1, "new"), (2, "forward"), (3, "forward")]
    order += [(3, "backward"), (2, "backward"), (1, "backward"), (0, "forward"), (1, "forward")]
    order += [(2, "new"), (3, "new"), (3, "backward"), (2, "backward"), (1, "backward")]
    assert sum(fetched(order, [1] * 4, 4).values()) == 0
    for capacity in range(4):
        assert sum(fetched(order, [1] * 4, capacity).values()) == steady(order, capacity)


def steady(order: list[tuple[int, Access]], capacity: int) -> int:
    """The least of a step among others."""
    twice, thrice = (least(order * count, capacity) for count in (2, 3))
    return thrice - twice


def test_orders_of_other_models() -> None:
    rng = random.Random(0)
    for _ in range(40):
        units = rng.randint(2, 4)
        order: list[tuple[int, Access]] = [(unit, "new") for unit in range(units)]
        order += [(rng.randrange(units), "backward") for _ in range(rng.randint(2, 8))]
        for capacity in range(units):
            assert sum(fetched(order, [1] * units, capacity).values()) == least(order, capacity)
