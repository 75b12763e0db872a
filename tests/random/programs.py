"""Programs: what users' loops do between one optimizer step and the next, in a random order."""

from collections.abc import Sequence
from itertools import count
from random import Random

from tests.random.cases import (
    Accumulate,
    Action,
    Backward,
    BrokenBackward,
    BrokenForward,
    Clip,
    Forward,
    LostForward,
    State,
    Step,
    Zero,
)

STEPS = 3
STEPS_OF_REPLICAS = 6  # that exchanges begin, arrive, and begin again


def program_of(random: Random, has: set[str], lengths: Sequence[int]) -> tuple[Action, ...]:
    """Some optimizer steps of nets with so many parts, and the state at the end."""
    actions = _Actions(random, has, lengths)
    accumulation = random.randint(2, 3) if "accumulation" in has else 1
    program: list[Action] = []
    for step in range(STEPS_OF_REPLICAS if "sync" in has else STEPS):
        if "broken-backward" in has and step > 0 and random.random() < 0.5:
            program += actions.given_up(accumulation)
        if "plain" in has:
            program += actions.micro_batches(accumulation, with_no_sync=True)
        else:
            program += actions.between()
            program += actions.micro_batches(accumulation, with_no_sync=random.random() < 0.7)
            program += actions.between()
        if "clip" in has:
            program.append(Clip(random.choice((1e-3, 0.1, 100.0))))
        program.append(actions.step())
        program += actions.between()
        program.append(actions.zero())
    program += actions.between()
    if "sync" in has:  # of the weights as exchanges have left them; a state has what replicas agreed on
        program.append(actions.lost_forward("no_grad"))
    return (*program, State())


class _Actions:
    def __init__(self, random: Random, has: set[str], lengths: Sequence[int]) -> None:
        self._random, self._has, self._lengths = random, has, lengths
        self._numbers = count()

    def _likely(self, share: float) -> bool:
        return self._random.random() < share

    def _forward(self) -> Forward:
        places = range(self._lengths[-1] - 1)  # the last is never left out
        skips = "skipped" in self._has and self._likely(0.5)
        return Forward(next(self._numbers), tuple(i for i in places if skips and self._likely(0.5)))

    def lost_forward(self, mode: str) -> LostForward:
        return LostForward(next(self._numbers), mode)

    def _place(self) -> tuple[int, int]:
        net = self._random.randrange(len(self._lengths))
        return net, self._random.randrange(self._lengths[net])

    def between(self) -> list[Action]:
        """What may come between any two passes."""
        actions: list[Action] = []
        if "plain" in self._has:
            return actions
        if "lost" in self._has and self._likely(0.4):
            actions.append(self.lost_forward(self._random.choice(("train", "no_grad", "inference"))))
        if "broken-forward" in self._has and self._likely(0.4):
            net, place = self._place()
            mode = self._random.choice(("train", "no_grad"))
            actions.append(BrokenForward(next(self._numbers), net, place, mode))
        if "state" in self._has and self._likely(0.3):
            actions.append(State())
        self._random.shuffle(actions)
        return actions

    def micro_batches(self, accumulation: int, with_no_sync: bool) -> list[Action]:
        """Forward and backward passes of a step."""
        if "breadth" in self._has:
            return self._breadth_first(accumulation, with_no_sync)
        if "flights" in self._has and accumulation > 1:
            return self._in_flight(accumulation, with_no_sync)
        actions: list[Action] = []
        for micro in range(accumulation):
            forward = self._forward()
            actions.append(forward)
            if "state" in self._has and self._likely(0.2):
                actions.append(State())
            is_last = micro == accumulation - 1
            if "retained" in self._has and self._likely(0.4):
                actions.append(Backward((forward.number,), sync=not with_no_sync, keep=True))
                actions += self.between()
            is_carried = "carried" in self._has and self._likely(0.3)  # into the next step
            actions.append(Backward((forward.number,), (is_last or not with_no_sync) and not is_carried))
            actions += [] if is_last else self.between()
        return actions

    def _breadth_first(self, accumulation: int, with_no_sync: bool) -> list[Action]:
        """All at once, or some of them under `no_sync` before the others."""
        numbers = tuple(next(self._numbers) for _ in range(accumulation))
        if "plain" in self._has or not self._likely(0.4):
            return [Accumulate(numbers, sync=True)]
        first = self._random.randrange(1, accumulation + 1)
        left = numbers[first:]
        last = [Accumulate(left, sync=True)] if left else self._last()
        return [Accumulate(numbers[:first], sync=not with_no_sync), *self.between(), *last]

    def _last(self) -> list[Action]:
        """One micro-batch more, as loops have it that are not breadth-first."""
        forward = self._forward()
        return [forward, Backward((forward.number,), sync=True)]

    def _in_flight(self, accumulation: int, with_no_sync: bool) -> list[Action]:
        """Forward passes first, some with a backward between them as in a pipeline; then the rest."""
        actions: list[Action] = []
        waiting: list[int] = []
        for _ in range(accumulation):
            forward = self._forward()
            actions += [forward, *self.between()]
            waiting.append(forward.number)
            if len(waiting) > 1 and self._likely(0.3):
                actions.append(self._backward_of_one(waiting, sync=not with_no_sync))
        if self._likely(0.4):
            return [*actions, Backward(tuple(waiting), sync=True)]
        while waiting:
            actions.append(self._backward_of_one(waiting, sync=len(waiting) == 1 or not with_no_sync))
            actions += self.between() if waiting else []
        return actions

    def _backward_of_one(self, waiting: list[int], sync: bool) -> Backward:
        return Backward((waiting.pop(self._random.choice((0, -1))),), sync)

    def given_up(self, accumulation: int) -> list[Action]:
        """A step whose last backward raises.

        Two nets then have nothing accumulated: the one that the backward has not reached would keep it.
        """
        actions: list[Action] = []
        for _ in range(accumulation - 1 if len(self._lengths) == 1 else 0):
            forward = self._forward()
            actions += [forward, Backward((forward.number,), sync=self._likely(0.3))]
        forward = Forward(next(self._numbers), ())
        net, place = self._place()
        where = self._random.choice(("backward", "backward", "recompute"))
        broken = [forward, BrokenBackward(forward.number, net, place, where), Zero("none")]
        if "outlives" in self._has and self._likely(0.5):  # another micro-batch outlives it
            other = self._forward()
            return [*actions, other, *broken, Backward((other.number,), sync=self._likely(0.5))]
        return [*actions, *broken]

    def step(self) -> Step:
        if "optimizers" not in self._has:
            return Step((0,))
        return Step(self._random.choice(((0,), (1,), (0, 1), (1, 0))))

    def zero(self) -> Zero:
        if "modules-zero" in self._has and self._likely(0.7):
            return Zero("modules")
        return Zero(self._random.choice(("none", "none", "zeros")))
