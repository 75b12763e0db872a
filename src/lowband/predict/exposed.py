"""What a step's passes wait for collectives of weights and gradients; formulas are at the top of time.py."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from lowband.cost.numbers import Num, join
from lowband.predict.place import Place
from lowband.predict.workload import Workload
from lowband.spec.step import STEP

Lane = dict[str, Num]  # collective -> seconds in the lane


@dataclass(frozen=True)
class Waits:
    """Seconds of one micro-batch for which a block waits for what is no weights or gradients, the recomputed
    forward's in backward. All are 0 where nothing travels.

    once: besides, in all blocks: of a micro-batch along context, of a step on the way to experts
    lane: of each row, hidden or not, in all blocks of a rank, and as often as `once`
    """

    forward: Num = 0.0
    backward: Num = 0.0
    once: Num = 0.0
    lane: Mapping[str, Num] = field(default_factory=dict)


@dataclass(frozen=True)
class Passes:
    """Seconds of one micro-batch, and of each collective of the root and of a block.

    forward, backward: of a block; head: backward
    """

    job: Workload
    place: Place
    root: Lane
    block: Lane
    forward: Num
    backward: Num
    head: Num
    overlap: float

    def exposed(self) -> Iterator[tuple[str, Num]]:
        """Collectives, and seconds of a step for which computation waits for them."""
        again, backward_again = (often - 1 for often in self.place.gathers)
        # The first forward of a step gathers updated weights; the last backward reduces to the optimizer's.
        yield from self._forward(("pass", "step"), 1)
        yield from self._forward(("pass",), again)
        if self.job.is_in_stages:
            yield from self._backward(_names("backward", "weights", ("pass",)), (), backward_again + 1)
            yield from self._backward((), _names("backward", "gradients", ("pass", "step")), 1)
        else:
            for every, times in ((("pass", "step"), 1), (("pass",), backward_again)):
                gathers, reductions = (_names("backward", w, every) for w in ("weights", "gradients"))
                yield from self._backward(gathers, reductions, times)

    def _forward(self, every: tuple[str, ...], times: Num) -> Iterator[tuple[str, Num]]:
        gathers = _names("forward", "weights", every)
        g, g_root = total(self.block, gathers), total(self.root, gathers)
        busy = self._turns(gathers=True) * self.forward
        exposed = g_root + g + (self.place.blocks - 1) * (join(busy, g, self.overlap) - busy)
        return self._attributed(exposed * times, gathers)

    def _backward(
        self, gathers: tuple[str, ...], reductions: tuple[str, ...], times: Num
    ) -> Iterator[tuple[str, Num]]:
        g, r, r_root = total(self.block, gathers), total(self.block, reductions), total(self.root, reductions)
        turns = self._turns(gathers=bool(gathers))
        busy, head = turns * self.backward, turns * self.head
        exposed = join(head, g, self.overlap) - head
        last = self.place.last if reductions else 1
        hidden = self.place.blocks - last
        exposed = exposed + hidden * (join(busy, g + r, self.overlap) - busy) + last * r + r_root
        return self._attributed(exposed * times, [*gathers, *reductions])

    def _turns(self, gathers: bool) -> Num:
        """Micro-batches behind which a unit's collectives run; in stages, only one behind which it is
        gathered."""
        is_breadth = self.job.order == "breadth" and not (gathers and self.job.is_in_stages)
        return self.job.accumulation if is_breadth else 1

    def _attributed(self, exposed: Num, names: Iterable[str]) -> Iterator[tuple[str, Num]]:
        """Exposed seconds by collective, in proportion to their time in the lane."""
        lane = {
            name: self.place.blocks * self.block.get(name, 0.0) + self.root.get(name, 0.0) for name in names
        }
        whole = total(lane, lane)
        for name, time in lane.items():
            if time if isinstance(time, float) else np.any(time):  # a tenth of numpy's time
                yield name, exposed * (time / whole)


@cache
def _names(during: str, carries: str, every: tuple[str, ...]) -> tuple[str, ...]:
    """Names of a pass's collectives, in order."""
    return tuple(r.name for r in STEP if (r.during, r.carries) == (during, carries) and r.every in every)


def total(lane: Lane, names: Iterable[str]) -> Num:
    """Seconds of these collectives together."""
    found: Num = 0.0
    for name in names:
        found = found + lane.get(name, 0.0)
    return found
