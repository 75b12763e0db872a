"""Which sequences of a batch go to which ranks when their lengths differ: groups and zones in one planner.

Ranks are halved again and again: a place is an aligned block of 1, 2, 4, ... of them, and a sequence lies on
one place, as ranks along context of that degree. Two ways to share ranks:

    groups   places of a micro-step do not overlap (FlexSP, arXiv 2412.01523)
    zones    a rank computes its part of long sequences, then of shorter ones, then those that stay on it
             (Zeppelin, arXiv 2509.21841: over nodes, in a node, on a rank)

A batch is cut into micro-steps. A micro-step takes as long as its busiest rank, and a rank has room for so
many tokens; search/lengths_step.py solves it.

The best zones are never slower than the best groups, but what is found by degree is not always the best:
`fastest` tries zones, groups and one degree for all. Equal parts of a sequence take equally long: for causal
attention that takes the order zigzag.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from lowband.predict.room import DoesNotFit
from lowband.predict.search.lengths_step import NEAR, Costs, MicroStep, micro_step

MORE_STEPS = 1  # micro-steps that are tried beyond the fewest that have room


@dataclass(frozen=True)
class LengthPlan:
    """A batch's micro-steps. seconds: of all of them, with what each takes whatever is in it"""

    steps: list[MicroStep]
    seconds: float

    @property
    def integers(self) -> int:
        """Of the largest milp that was solved for a micro-step of this plan."""
        return max(step.integers for step in self.steps)


def plan_lengths(
    lengths: Sequence[int],
    ranks: int,
    costs: Costs,
    degrees: Sequence[int],
    zones: bool,
    known: LengthPlan | None = None,
) -> LengthPlan:
    """The fastest plan found for a batch. degrees: powers of two that divide ranks; zones: or groups

    known: a plan that stands if none is faster

    Raises DoesNotFit for a sequence that has no room on a place of the largest degree.
    """
    longest, widest = max(lengths), max(degrees)
    if longest > widest * costs.room * (1 + NEAR):
        raise DoesNotFit(
            f"a sequence of {longest} tokens fits nowhere: {widest} ranks have room for "
            f"{int(widest * costs.room)}",
            allowed="shorter sequences, more ranks or more memory a rank",
        )
    best, first = known, 0
    fewest = max(1, math.ceil(sum(lengths) / (ranks * costs.room * (1 + NEAR))))
    for count in range(fewest, len(lengths) + 1):  # one sequence a micro-step always has room
        for cut in cuts(lengths, count):
            found = _solved(cut, ranks, costs, degrees, zones, np.inf if best is None else best.seconds)
            best = found or best
            first = first or (count if best else 0)
        if best is not None and count >= first + MORE_STEPS:
            break
    assert best is not None  # of as many micro-steps as sequences
    return best


def best_of_one_degree(
    lengths: Sequence[int], ranks: int, costs: Costs, degrees: Sequence[int]
) -> LengthPlan:
    """The fastest plan with one degree for the whole batch, as FlexSP-BatchAda has it.

    Raises DoesNotFit as `plan_lengths` does.
    """
    fitting = [d for d in degrees if max(lengths) <= d * costs.room] or [max(degrees)]
    plans = [plan_lengths(lengths, ranks, costs, [degree], False) for degree in fitting]
    return min(plans, key=lambda one: one.seconds)


def fastest(lengths: Sequence[int], ranks: int, costs: Costs, degrees: Sequence[int]) -> LengthPlan:
    """The fastest of zones, groups and one degree for all. Raises DoesNotFit as `plan_lengths` does."""
    best = plan_lengths(lengths, ranks, costs, degrees, True)
    best = plan_lengths(lengths, ranks, costs, degrees, False, best)
    for degree in degrees:
        if max(lengths) <= degree * costs.room:
            best = plan_lengths(lengths, ranks, costs, [degree], False, best)
    return best


def cuts(lengths: Sequence[int], count: int) -> Iterator[list[list[int]]]:
    """A batch in `count` micro-steps in two ways: runs of the sorted lengths with the smallest possible
    maximum of tokens (FlexSP's), and dealt, the longest first, to the micro-step with the fewest."""
    ordered = sorted(lengths, reverse=True)
    low, high = max(ordered[0], math.ceil(sum(ordered) / count)), sum(ordered)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_runs(ordered, middle)) <= count else (middle + 1, high)
    yield _runs(ordered, low)
    if count > 1:
        dealt, tokens = [list[int]() for _ in range(count)], [0] * count
        for length in ordered:
            least = tokens.index(min(tokens))
            dealt[least].append(length)
            tokens[least] += length
        yield dealt


def _runs(ordered: Sequence[int], most: int) -> list[list[int]]:
    runs, tokens = [list[int]()], 0
    for length in ordered:
        if tokens + length > most:
            runs.append([])
            tokens = 0
        runs[-1].append(length)
        tokens += length
    return runs


def _solved(
    cut: list[list[int]], ranks: int, costs: Costs, degrees: Sequence[int], zones: bool, before: float
) -> LengthPlan | None:
    """The plan of these micro-steps; None if one of them has no room, or all take `before` seconds."""
    steps, left = list[MicroStep](), before - len(cut) * costs.fixed_s
    for lengths in cut:
        step = micro_step(lengths, ranks, costs, degrees, zones, left) if left > 0 else None
        if step is None or step.seconds >= left:
            return None
        steps.append(step)
        left -= step.seconds
    return LengthPlan(steps, sum(step.seconds + costs.fixed_s for step in steps))
