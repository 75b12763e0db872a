"""A pipeline's schedule as data: for each rank, the list of what it computes, in order.

Everything else follows from the lists: whether they can run (`check`), how much a rank holds (`peak`), and
when each action ends (cost/timeline.py). Named schedules are rows of spec/schedules.py.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple

from lowband.errors import UserError

# input, weight: a backward in two parts, the gradient of the stage's input and those of its weights
Kind = Literal["forward", "backward", "input", "weight"]

Part = Literal["forward", "input", "weight"]


class Action(NamedTuple):
    """What a rank computes next: of one stage (a part of the model, counted from its start), for one
    micro-batch of the step."""

    kind: Kind
    stage: int
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind} of stage {self.stage}, micro-batch {self.micro_batch}"

    @property
    def parts(self) -> tuple[Part, ...]:
        """What has been computed when it ends: a whole backward is both parts."""
        return ("input", "weight") if self.kind == "backward" else (self.kind,)


Lists = Sequence[Sequence[Action]]  # by rank, in the order of execution

Done = tuple[Part, int, int]  # a computed part: of which stage, for which micro-batch


def stages(lists: Lists) -> int:
    """Stages of the whole pipeline."""
    return 1 + max((action.stage for of_rank in lists for action in of_rank), default=-1)


def needs(action: Action, last: int) -> list[Done]:
    """The parts whose results an action takes: those of the neighbouring stage, or of its own one.

    last: the last stage
    """
    kind, stage, i = action
    if kind == "weight":
        return [("input", stage, i)]
    if kind == "forward":
        return [("forward", stage - 1, i)] if stage > 0 else []
    found: list[Done] = [("forward", stage, i)]
    return [*found, ("input", stage + 1, i)] if stage < last else found


def walk(lists: Lists) -> Iterator[tuple[int, Action, list[Done]]]:
    """(rank, action, what it needs) in an order in which the actions can run: each after what it needs.

    Raises UserError where no rank can go on: a deadlock.
    """
    last, done = stages(lists) - 1, set[Done]()
    at, moved = [0] * len(lists), True
    while moved:
        moved = False
        for rank, of_rank in enumerate(lists):
            while at[rank] < len(of_rank):
                action = of_rank[at[rank]]
                needed = needs(action, last)
                if not done.issuperset(needed):
                    break
                for part in action.parts:
                    done.add((part, action.stage, action.micro_batch))
                at[rank], moved = at[rank] + 1, True
                yield rank, action, needed
    waiting = []
    for rank, of_rank in enumerate(lists):
        if at[rank] < len(of_rank):
            action = of_rank[at[rank]]
            part, stage, i = next(need for need in needs(action, last) if need not in done)
            waiting.append(
                f"rank {rank}, before its {action}, for the {part} of stage {stage}, micro-batch {i}"
            )
    if waiting:
        raise UserError(
            f"the ranks of a schedule wait for each other: {'; '.join(waiting)}",
            allowed="lists in which each action comes after what it needs",
        )


def check(lists: Lists) -> None:
    """Check that lists are a step: every stage lies on one rank, and computes each micro-batch once, forward
    and backward (whole, or input and weight), in an order that comes to its end.

    Raises UserError that names the first action which is wrong.
    """
    ranks: dict[int, int] = {}
    for rank, of_rank in enumerate(lists):
        for action in of_rank:
            if ranks.setdefault(action.stage, rank) != rank:
                raise UserError(
                    f"stage {action.stage} of a schedule lies on ranks {ranks[action.stage]} and {rank}",
                    allowed="each stage on one rank",
                )
    found = Counter(
        (part, action.stage, action.micro_batch)
        for of_rank in lists
        for action in of_rank
        for part in action.parts
    )
    micro_batches = 1 + max((i for _, _, i in found), default=-1)
    parts: tuple[Part, ...] = ("forward", "input", "weight")
    expected = [(part, s, i) for s in range(stages(lists)) for i in range(micro_batches) for part in parts]
    if not expected:
        raise UserError("a schedule without actions", allowed="a forward and a backward, or more")
    for part, stage, i in (*expected, *found):
        times = found[part, stage, i]
        if times != 1 or min(stage, i) < 0:
            raise UserError(
                f"a schedule computes the {part} of stage {stage}, micro-batch {i}, {times} times",
                allowed="each once, of stages and micro-batches from 0; a whole backward is input and weight",
            )
    for _ in walk(lists):
        pass


def count(lists: Lists, kind: Kind) -> list[int]:
    """Actions of a kind, by rank."""
    return [sum(action.kind == kind for action in of_rank) for of_rank in lists]


def peak(lists: Lists) -> list[int]:
    """Activations in flight at the fullest moment, by rank, in those of one micro-batch in one stage.

    They are held from the forward until the backward has ended, a split one until its weight part has.
    """
    return [_most(of_rank, "forward", ("backward", "weight")) for of_rank in lists]


def owed(lists: Lists) -> list[int]:
    """Weight parts that wait at the fullest moment, by rank; an input part that is computed counts."""
    return [_most(of_rank, "input", ("weight",)) for of_rank in lists]


def _most(actions: Sequence[Action], begins: Kind, ends: Sequence[Kind]) -> int:
    """Of what such actions begin and end, how much there is at once at the most."""
    changes = ((action.kind == begins) - (action.kind in ends) for action in actions)
    return max(accumulate(changes, initial=0))
