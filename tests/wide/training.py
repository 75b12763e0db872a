"""The loop of a case, once for both sides: `sharded.Sharded` on ranks, `plain.Plain` in one process."""

from typing import Protocol

from tests.wide.cases import STEPS, Case


class Side(Protocol):
    """What the loop calls. Each call does the same on the ranks and in the process that plays all of them."""

    def backward(self, step: int) -> None: ...
    def see_gradients(self) -> None: ...
    def clip(self, max_norm: float) -> None: ...
    def step(self) -> None: ...
    def evaluate(self, step: int) -> None: ...
    def generate(self, step: int) -> None: ...
    def average(self, start: bool) -> None: ...
    def take_average(self) -> None: ...
    def resume(self) -> None: ...
    def see_state(self) -> None: ...


def train(case: Case, side: Side) -> None:
    if case.average:
        side.average(start=True)
    for step in range(STEPS):
        side.backward(step)
        side.see_gradients()
        if case.clip is not None:
            side.clip(case.clip)
        side.step()
        if case.average:
            side.average(start=False)
        if case.evaluation != "none":
            side.evaluate(step)
        if case.generation != "none" and step != 1:
            side.generate(step)
        if case.resumed is not None and step == 0:
            side.resume()
    side.see_state()
    if case.average:
        side.take_average()
        side.evaluate(STEPS)
        side.see_state()
