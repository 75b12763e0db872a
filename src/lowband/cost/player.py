"""A list scheduler: plays a step of a pipeline, and lets every rank choose what it computes next.

Whenever a rank is free, it takes what has arrived and comes first by its wanted time, as long as its memory
allows. A rank keeps a place free for each stage behind the one whose forward it starts, so that its memory
never holds up the micro-batches that would free it: in a V, forwards of the first stages alone could fill it.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import NamedTuple

from lowband.cost.timeline import timeline
from lowband.spec.schedule import Action, Kind, Lists
from lowband.spec.schedules import Name

Wanted = Mapping[Action, float]  # when an action would best start; a weight part with its own, too


class Seconds(NamedTuple):
    """Of one micro-batch in all of a rank's stages, which are alike; send: between two ranks."""

    forward: float
    input: float
    weight: float
    send: float

    def of_a_stage(self, chunks: int) -> "Seconds":
        return Seconds(self.forward / chunks, self.input / chunks, self.weight / chunks, self.send)


@dataclass(frozen=True)
class Found:
    """lists: by rank; name: of the published schedule, unless a shorter step was found; step_s: predicted"""

    lists: Lists
    name: Name | None
    step_s: float

    def bubble(self, seconds: Seconds, micro_batches: int) -> float:
        """The share of the step for which a rank is idle."""
        return 1 - micro_batches * (seconds.forward + seconds.input + seconds.weight) / self.step_s


class Habits(NamedTuple):
    """One each of FILLS, WAITS, PAYS, SHARES."""

    fills: float
    waits: float
    pays: bool
    shares: bool


class Player:
    """Plays steps of one shape: the stages on the ranks of a published schedule, and its memory.

    Times are compared with SLACK, so that the order of sums decides nothing.
    """

    SLACK = 1e-9

    def __init__(self, published: Lists, micro_batches: int, seconds: Seconds, limit: int) -> None:
        """seconds: of a stage; limit: activations of a stage that a rank may hold"""
        self._published, self._micro_batches = published, micro_batches
        self._seconds, self._limit = seconds, limit
        self._rank_of = {a.stage: rank for rank, of_rank in enumerate(published) for a in of_rank}
        self._count = len(self._rank_of)
        self._stages = [
            [s for s in range(self._count) if self._rank_of[s] == r] for r in range(len(published))
        ]
        self._shares = self._by_holding()
        # places that a forward leaves free for the rank's later stages
        self._spare = {s: len(of_it) - 1 - k for of_it in self._stages for k, s in enumerate(of_it)}

    def sources(self) -> list[Wanted]:
        """Wanted times: of the published list, without and with sends, and of as many devices as actions."""
        at_once = self._seconds._replace(send=0.0)
        return [_ends(self._published, at_once), _ends(self._published, self._seconds), self._unlimited()]

    def _unlimited(self) -> Wanted:
        """Each micro-batch on its own, the next one when a rank has had the time to compute this one."""
        forward, input_, weight, send = self._seconds
        every, at, found = len(self._stages[0]) * (forward + input_ + weight), 0.0, dict[Action, float]()
        order: list[tuple[Kind, int, float]] = [("forward", s, forward) for s in range(self._count)]
        order += [("input", s, input_) for s in reversed(range(self._count))]
        before = self._rank_of[0]
        for kind, stage, took in order:
            at += took + (send if self._rank_of[stage] != before else 0.0)
            before = self._rank_of[stage]
            for i in range(self._micro_batches):
                found[Action(kind, stage, i)] = at + i * every
                if kind == "input":
                    found[Action("weight", stage, i)] = at + weight + i * every
        return found

    def _by_holding(self) -> list[int]:
        """The rank's memory by stage, as long as each holds a micro-batch that nothing delays."""
        alone, (forward, _, weight, _) = self._unlimited(), self._seconds
        ends = [(alone[Action("input", s, 0)], alone[Action("forward", s, 0)]) for s in range(self._count)]
        holds = [last + weight - first + forward for last, first in ends]
        fullest = max(sum(holds[s] for s in of_it) for of_it in self._stages)
        return [max(1, int(hold / fullest * self._limit + 0.5)) for hold in holds]

    def play(self, wanted: Wanted, habits: Habits, before_s: float) -> Found | None:
        """A step that ends before `before_s`; None if this one does not."""
        step = _Step(self._stages, self._micro_batches)
        while step.events:
            now, rank = heappop(step.events)
            if now >= before_s:
                return None
            if step.free[rank] <= now + self.SLACK:
                action = self._next(step, rank, now, wanted, habits)
                if action is not None:
                    self._do(step, rank, now, action)
        return Found(step.lists, None, max(step.free))

    def _next(self, step: "_Step", rank: int, now: float, wanted: Wanted, habits: Habits) -> Action | None:
        """What a free rank starts now; None: it waits for the next arrival."""
        best, best_at, soon, earlier, is_full = None, inf, inf, (inf, inf), False
        for stage in self._stages[rank]:
            for kind, queue in (("forward", step.forwards[stage]), ("input", step.inputs[stage])):
                if not queue:
                    continue
                arrived = queue[0] <= now + self.SLACK
                if kind == "forward" and (
                    step.held[rank] + 1 + self._spare[stage] > self._limit
                    or (habits.shares and step.begun[kind, stage] - step.ended[stage] >= self._shares[stage])
                ):
                    is_full |= arrived
                    continue
                action = Action(kind, stage, step.begun[kind, stage])  # type: ignore[arg-type]
                at = wanted[action]
                if not arrived:
                    soon, earlier = min(soon, queue[0]), min(earlier, (at, queue[0]))
                elif at < best_at:
                    best, best_at = action, at
        if earlier[0] < best_at and earlier[1] - now < habits.waits * self._seconds.forward:
            best = None
        owed = step.owed[rank]
        if owed and best is None:
            gap = soon - now - (1 - habits.fills) * self._seconds.weight
            return owed[0] if is_full or gap >= -self.SLACK else None
        if owed and habits.pays and wanted[owed[0]] < best_at:
            return owed[0]
        return best

    def _do(self, step: "_Step", rank: int, now: float, action: Action) -> None:
        kind, stage, _ = action
        end = now + getattr(self._seconds, kind)
        step.lists[rank].append(action)
        step.free[rank] = end
        heappush(step.events, (end, rank))
        if kind == "weight":
            step.owed[rank].popleft()
            step.held[rank] -= 1
            step.ended[stage] += 1
            return
        step.begun[kind, stage] += 1
        if kind == "forward":
            step.forwards[stage].popleft()
            step.held[rank] += 1
            following = stage + 1 if stage + 1 < self._count else None
            queue = step.inputs[stage] if following is None else step.forwards[following]
        else:
            step.inputs[stage].popleft()
            step.owed[rank].append(action._replace(kind="weight"))
            following = stage - 1 if stage > 0 else None
            queue = deque[float]() if following is None else step.inputs[following]
        if following is not None and self._rank_of[following] != rank:
            end += self._seconds.send
            heappush(step.events, (end, self._rank_of[following]))
        queue.append(end)


class _Step:
    """A step that is played.

    forwards, inputs: by stage, when the next ones of a kind can start; micro-batches go in order
    begun:            by kind and stage, how many have started
    ended:            by stage, its weight parts
    owed:             by rank, the weight parts whose input parts are done; held: activations
    free:             by rank, when its last action ends; events: times at which a rank may start one
    """

    def __init__(self, stages: Sequence[Sequence[int]], micro_batches: int) -> None:
        every = [stage for of_rank in stages for stage in of_rank]
        self.forwards = {stage: deque[float]() for stage in every}
        self.inputs = {stage: deque[float]() for stage in every}
        self.forwards[0].extend([0.0] * micro_batches)
        self.begun = {(kind, stage): 0 for kind in ("forward", "input") for stage in every}
        self.ended = dict.fromkeys(every, 0)
        self.owed = [deque[Action]() for _ in stages]
        self.held, self.free = [0] * len(stages), [0.0] * len(stages)
        self.lists: list[list[Action]] = [[] for _ in stages]
        self.events = [(0.0, rank) for rank in range(len(stages))]


def _ends(of_it: Lists, seconds: Seconds) -> Wanted:
    """When each action of lists ends."""
    ends = timeline(of_it, *seconds).ends
    return {
        a: float(end)
        for of_rank, at in zip(of_it, ends, strict=True)
        for a, end in zip(of_rank, at, strict=True)
    }
