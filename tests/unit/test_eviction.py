"""Eviction by next use beside Belady's bound, brute force and an exact optimum; swaps, counted."""

import random
from functools import cache
from itertools import combinations

import pytest

from lowband.cost.eviction import (
    RULES,
    Access,
    counted_swaps,
    moved,
    optimum,
    order_of_step,
    swaps_grouped,
    swaps_virtual,
    virtual_order,
)
from lowband.errors import UserError


def belady(order: list[str], capacity: int) -> int:
    """Fetches of Belady's rule, by searching ahead at each miss: on purpose not as in cost/eviction."""
    held: list[str] = []
    fetches = 0
    for i, chunk in enumerate(order):
        if chunk in held:
            continue
        fetches += 1
        if len(held) == capacity:
            rest = order[i + 1 :]
            held.remove(max(held, key=lambda one: rest.index(one) if one in rest else len(order)))
        held.append(chunk)
    return fetches


def least_moved(order: list[Access], sizes: dict[str, int], capacity: int) -> int:
    """By trying at each miss every set of chunks that may leave."""

    @cache
    def from_here(i: int, held: frozenset[str], dirty: frozenset[str]) -> int:
        if i == len(order):
            return sum(sizes[chunk] for chunk in dirty)
        chunk = order[i].chunk
        after = dirty | {chunk} if order[i].writes else dirty
        if chunk in held:
            return from_here(i + 1, held, after)
        best = 10**9
        for many in range(len(held) + 1):
            for leave in combinations(sorted(held), many):
                kept = held - set(leave)
                if sum(sizes[one] for one in kept) + sizes[chunk] <= capacity:
                    back = sum(sizes[one] for one in leave if one in dirty)
                    rest = from_here(i + 1, kept | {chunk}, (after - set(leave)))
                    best = min(best, sizes[chunk] + back + rest)
        return best

    return from_here(0, frozenset(), frozenset())


def drawn(seed: int, same_size: bool, writes: bool) -> tuple[list[Access], dict[str, int], int]:
    rng = random.Random(seed)
    chunks = [f"c{i}" for i in range(rng.randint(3, 6))]
    sizes = {chunk: 1 if same_size else rng.randint(1, 5) for chunk in chunks}
    order = [Access(rng.choice(chunks), writes and rng.random() < 0.4) for _ in range(rng.randint(6, 12))]
    least = max(sizes[access.chunk] for access in order)
    return order, sizes, rng.randint(least, least + (2 if same_size else 6))


@pytest.mark.parametrize("seed", range(200))
def test_equal_chunks_are_fetched_as_often_as_the_bound_says(seed: int) -> None:
    order, sizes, capacity = drawn(seed, same_size=True, writes=False)
    fetches = moved(order, sizes, capacity).fetches
    assert fetches == belady([access.chunk for access in order], capacity)
    if seed < 60:
        assert fetches == least_moved(order, sizes, capacity)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("same_size", [True, False])
@pytest.mark.parametrize("writes", [True, False])
def test_the_optimum_is_that_of_brute_force(seed: int, same_size: bool, writes: bool) -> None:
    order, sizes, capacity = drawn(seed, same_size, writes)
    least = least_moved(order, sizes, capacity)
    assert optimum(order, sizes, capacity) == least
    assert all(moved(order, sizes, capacity, rule).total >= least for rule in RULES)


def test_a_step_again_and_again_fetches_what_does_not_stay() -> None:
    """Forward and back over n units with room for c: between turns, n - c are fetched each way, but for what
    the turn finds; so the bound of a step in steady state is 2 (n - c)."""
    units = [f"u{i}" for i in range(12)]
    sizes = dict.fromkeys(units, 3)
    for room in range(1, 12):
        found = moved(order_of_step(units), sizes, 3 * room, steps=4)
        whole = [access.chunk for access in order_of_step(units)] * 4
        before = belady(whole[: 3 * 24], room)
        assert found.fetches == belady(whole, room) - before == 2 * (12 - room)
        assert found.fetched == 3 * found.fetches
    assert moved(order_of_step(units), sizes, 36, steps=2).total == 0


def test_least_recently_used_ties_on_a_way_there_and_back_and_loses_on_a_round() -> None:
    units = [f"u{i}" for i in range(8)]
    sizes = dict.fromkeys(units, 1)
    there_and_back = {rule: moved(order_of_step(units), sizes, 5, rule, steps=3).fetches for rule in RULES}
    assert there_and_back["next use"] == there_and_back["least recent"] < there_and_back["first in"]
    in_a_round = [Access(unit) for unit in units]
    assert moved(in_a_round, sizes, 5, "least recent", steps=3).fetches == 8
    assert moved(in_a_round, sizes, 5, "next use", steps=3).fetches < 5


def test_a_chunk_larger_than_the_memory_is_refused() -> None:
    with pytest.raises(UserError, match="a chunk of 7 bytes"):
        moved([Access("small"), Access("a")], {"small": 1, "a": 7}, 6)


@pytest.mark.parametrize("layers", [1, 2, 5, 48])
@pytest.mark.parametrize("micro_batches", [1, 2, 16])
def test_swaps_are_counted_as_in_closed_form(layers: int, micro_batches: int) -> None:
    assert counted_swaps(virtual_order(layers, micro_batches)) == swaps_virtual(layers, micro_batches)
    grouped = [*range(layers), *range(layers - 1, -1, -1)]
    assert counted_swaps(grouped, written=layers) == swaps_grouped(layers)
    # The same by the memory of this file: one layer's room, each layer written in its backward.
    order = [Access(str(layer), i >= layers) for i, layer in enumerate(grouped)]
    found = moved(order, {str(layer): 1 for layer in range(layers)}, 1)
    assert found.total == swaps_grouped(layers)
