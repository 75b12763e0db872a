"""When each action of a pipeline's schedule ends, and how long its ranks are idle.

A rank starts an action when the one before it in its list has ended and what it needs has arrived: at once
from a stage on the same rank, `send` seconds after it was computed from one on another rank. Sends run beside
the computation and do not delay each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np

from lowband.cost.numbers import Num
from lowband.cost.stages_step import simulated_s
from lowband.spec.schedule import Done, Lists, stages, walk
from lowband.spec.schedules import Name

ByStage = Num | Sequence[Num]  # a sequence: one for each stage; a number or array: the same for all of them


@dataclass(frozen=True)
class Timeline:
    """Seconds from the start of the step; a number each, or an array with one entry per point of a grid.

    ends:   of each action, in the order of the lists, by rank
    starts: of each rank's first action
    busy_s: what each rank's actions take
    """

    ends: list[list[Num]]
    starts: list[Num]
    busy_s: list[Num]

    @property
    def step_s(self) -> Num:
        """Until the last rank's last action has ended."""
        return _largest([of_rank[-1] for of_rank in self.ends])

    @property
    def span_s(self) -> Num:
        """Of the rank on which it is longest, the time from its first action to its last one's end: what a
        step takes where a rank can start the next one while others are still busy."""
        return _largest([of_rank[-1] - start for of_rank, start in zip(self.ends, self.starts, strict=True)])

    @property
    def bubble(self) -> Num:
        """The share of the step for which ranks are idle, in the mean over ranks."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.step_s)


def timeline(
    schedule: Lists, forward_s: ByStage, input_s: ByStage, weight_s: ByStage, send_s: ByStage = 0.0
) -> Timeline:
    """The timeline of lists that `spec.schedule.check` accepts.

    forward_s, input_s, weight_s: seconds of an action in a stage; a whole backward takes input_s + weight_s
    send_s:                       between neighbouring stages on two ranks; a sequence: behind each stage
    Arrays are broadcast against each other. Raises UserError for lists that come to no end.
    """
    last = stages(schedule) - 1
    forward, input_, weight, send = (
        _by_stage(seconds, last + 1) for seconds in (forward_s, input_s, weight_s, send_s)
    )
    whole = [i + w for i, w in zip(input_, weight, strict=True)]
    of_kind = {"forward": forward, "backward": whole, "input": input_, "weight": weight}
    ends: list[list[Num]] = [[] for _ in schedule]
    starts: list[Num] = [0.0] * len(schedule)
    busy: list[Num] = [0.0] * len(schedule)
    done: dict[Done, tuple[int, Num]] = {}  # the rank, and when it has it

    for rank, action, needed in walk(schedule):
        kind, stage, i = action
        start = ends[rank][-1] if ends[rank] else 0.0
        for need in needed:
            sender, arrives = done[need]
            if sender != rank:
                arrives = arrives + send[min(stage, need[1])]
            start = _later(start, arrives)
        if not ends[rank]:
            starts[rank] = start
        seconds = of_kind[kind][stage]
        end = start + seconds
        ends[rank].append(end)
        busy[rank] = busy[rank] + seconds
        for part in action.parts:
            done[part, stage, i] = rank, end
    return Timeline(ends, starts, busy)


def idle_s(
    name: Name, ranks: int, micro_batches: Num, chunks: int, forward_s: Num, input_s: Num, weight_s: Num
) -> Num:
    """Seconds of a named schedule's step for which a rank is idle, where all stages are alike.

    micro_batches:                may be an array, of whole numbers
    forward_s, input_s, weight_s: of one micro-batch in all of a rank's stages, sends included

    Simulated for at most 4 micro-batches per rank: from there on each adds as much as the last one.
    """
    several = np.broadcast_arrays(micro_batches, forward_s, input_s, weight_s)
    many, *seconds = ([float(each) for each in np.ravel(values)] for values in several)
    found = [_idle_s(name, ranks, int(m), chunks, *each) for m, *each in zip(many, *seconds, strict=True)]
    return np.reshape(found, several[0].shape)


@lru_cache(maxsize=2**14)  # a search asks for the same ones under every placement
def _idle_s(
    name: Name, ranks: int, micro_batches: int, chunks: int, forward_s: float, input_s: float, weight_s: float
) -> float:
    def simulated(many: int) -> float:
        of_stage = ((forward_s / chunks, input_s / chunks, weight_s / chunks),) * (ranks * chunks)
        between = (0.0,) * (len(of_stage) - 1)
        return simulated_s(name, ranks, many, of_stage, between) - many * (forward_s + input_s + weight_s)

    most = 4 * ranks
    idle = simulated(min(micro_batches, most))
    beyond = micro_batches - most
    return idle + beyond * (idle - simulated(most - 1)) if beyond > 0 else idle


def idle_passes(ranks: int, micro_batches: Num, chunks: int) -> Num:
    """The same of a schedule whose backwards are whole (1F1B, interleaved, breadth-first), in closed form: in
    passes, forward and backward, of one micro-batch through all of a rank's stages.

    (p - 1) / v (Narayanan et al., arXiv 2104.04473, section 2.2); with fewer micro-batches than ranks a rank
    also waits for the first of them at each further chunk, (p - m) (v - 1) / v.
    """
    missing = np.maximum(ranks - np.asarray(micro_batches), 0)
    idle: Num = (ranks - 1 + missing * (chunks - 1)) / chunks
    return idle


def _by_stage(seconds: ByStage, count: int) -> Sequence[Num]:
    return seconds if isinstance(seconds, Sequence) else [seconds] * count


def _largest(values: Sequence[Num]) -> Num:
    return reduce(_later, values)


def _later(one: Num, other: Num) -> Num:
    if isinstance(one, float) and isinstance(other, float):  # a tenth of numpy's time
        return other if other > one else one
    return np.maximum(one, other)
