"""The step of a named schedule with ever other seconds: what waits for what is worked out once.

A search asks for the same schedule with thousands of them. The result is that of cost.timeline, to the bit.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

from lowband.spec.schedule import Kind, needs, stages
from lowband.spec.schedules import Name, lists

KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True)
class Order:
    """A schedule's actions, each behind what it needs. Of each, in that order:

    costs:   the place of its seconds: KINDS times stages, those of a kind together
    behind:  the action before it on its rank; needs: two others that it waits for; -1: none
    last:    of the ranks
    """

    costs: "array[int]"
    behind: "array[int]"
    needs: tuple["array[int]", "array[int]"]
    last: tuple[int, ...]

    def step_s(self, seconds: Sequence[float]) -> float:
        """Seconds until the last rank's last action has ended. seconds: in the order of `costs`' places"""
        ends = [0.0] * (len(self.costs) + 1)  # what is behind none, -1, starts at once
        for i, (cost, behind, one, other) in enumerate(
            zip(self.costs, self.behind, *self.needs, strict=True)
        ):
            start = ends[behind]
            start = max(start, ends[one])
            start = max(start, ends[other])
            ends[i] = start + seconds[cost]
        return max(ends[i] for i in self.last)


@lru_cache(maxsize=128)
def order(name: Name, ranks: int, micro_batches: int, chunks: int) -> Order:
    """Of a named schedule."""
    of_ranks = lists(name, ranks, micro_batches, chunks)
    count, places = stages(of_ranks), {kind: i for i, kind in enumerate(KINDS)}
    done: dict[int, int] = {}  # a part, and the action that computes it
    part_of = {"forward": 0, "input": 1, "weight": 2}

    def part(kind: str, stage: int, micro_batch: int) -> int:
        return (part_of[kind] * count + stage) * micro_batches + micro_batch

    found = Order(array("i"), array("i"), (array("i"), array("i")), ())
    at, before, moved = [0] * ranks, [-1] * ranks, True
    while moved:
        moved = False
        for rank, of_rank in enumerate(of_ranks):
            while at[rank] < len(of_rank):
                action = of_rank[at[rank]]
                needed = [done.get(part(*need)) for need in needs(action, count - 1)]
                if None in needed:
                    break
                one, other, *_ = [*(i for i in needed if i is not None), -1, -1]
                here = len(found.costs)
                for kind in action.parts:
                    done[part(kind, action.stage, action.micro_batch)] = here
                found.costs.append(places[action.kind] * count + action.stage)
                found.behind.append(before[rank])
                found.needs[0].append(one)
                found.needs[1].append(other)
                before[rank], moved = here, True
                at[rank] += 1
    assert at == [len(of_rank) for of_rank in of_ranks]  # as spec.schedule.check has it of every one
    return Order(found.costs, found.behind, found.needs, tuple(before))
