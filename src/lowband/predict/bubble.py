"""For how long a pipeline's rank is idle in a step: by cost/timeline.py and cost/stages_step.py.

Where stages have equally many blocks they are taken as alike, and the head as if every rank computed it: the
last one sets the pace. Of uneven stages each has its own time, and the last one the head's.

A stack waits for messages between stages, or lets them travel beside the computation. Where it waits they are
part of what stages take. Beside the computation they make a step as much longer as the schedule's lists do
with every link's own time.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from lowband.cost.collectives import Network
from lowband.cost.compute import Work
from lowband.cost.numbers import Num
from lowband.cost.stages_step import OfStage, step_s
from lowband.cost.timeline import idle_passes, idle_s
from lowband.predict.place import Place
from lowband.predict.stage_messages import exchange_s, sends_s, tied_s
from lowband.predict.workload import Workload
from lowband.spec.schedules import SCHEDULES, Name


def along_pipeline(
    job: Workload, place: Place, w: Work, forward_s: Num, backward_s: Num, network: Network
) -> tuple[Num, Num]:
    """Seconds of a step that the rank at a place waits for messages, and that it is idle besides.

    forward_s, backward_s: of a micro-batch in one block, with what is beside the computation of `w`
    """
    of_stages, tied = (job, place, w, forward_s, backward_s), tied_s(job, network)
    if job.hides_sends:
        return _added_s(*of_stages, sends_s(job, network)) + tied, _idle_s(*of_stages, 0.0)
    exchange = exchange_s(job, network)
    return job.accumulation * exchange.slowest + tied, _idle_s(*of_stages, exchange.mean)


def _idle_s(job: Workload, place: Place, w: Work, forward_s: Num, backward_s: Num, exchange_s: Num) -> Num:
    """exchange_s: of a micro-batch, that a rank's stages wait for messages"""
    if place.stages:
        return _uneven(job, place, w, forward_s, backward_s, exchange_s)
    axes, pass_s = job.axes, place.blocks * (forward_s + backward_s)
    if not SCHEDULES[axes.row].splits:
        return idle_passes(axes.pipeline, job.accumulation, axes.chunks) * (pass_s + exchange_s)
    forward, weight = place.blocks * forward_s, place.blocks * w.weight
    input_s = pass_s - forward - weight + exchange_s / 2
    return idle_s(
        axes.row, axes.pipeline, job.accumulation, axes.chunks, forward + exchange_s / 2, input_s, weight
    )


def _added_s(
    job: Workload, place: Place, w: Work, forward_s: Num, backward_s: Num, sends_s: Sequence[Num]
) -> Num:
    """Seconds by which messages beside the computation make a step longer.

    sends_s: of one behind each stage but the last
    """
    axes, count = job.axes, job.axes.stages
    blocks = place.of_stage or (place.last,) * count
    of_stage = stage_s(axes.chunks, blocks, w, forward_s, backward_s, 0.0)
    several = np.broadcast_arrays(job.accumulation, *sends_s, *(part for stage in of_stage for part in stage))
    found = []
    for many, *times in zip(*(np.ravel(each).tolist() for each in several), strict=True):
        sends, parts = times[: count - 1], times[count - 1 :]
        stages = tuple(tuple(parts[at : at + 3]) for at in range(0, len(parts), 3))
        with_sends, without = (
            step_s(axes.row, axes.pipeline, int(many), stages, each) for each in (tuple(sends), ())
        )
        found.append(max(with_sends - without, 0.0))  # both are worked out further, each from its own rounds
    return np.reshape(found, several[0].shape)


def _uneven(job: Workload, place: Place, w: Work, forward_s: Num, backward_s: Num, exchange_s: Num) -> float:
    micro_batches = int(job.accumulation)
    of_stages: tuple[Any, ...] = place.of_stage, w, forward_s, backward_s, exchange_s
    step, of_stage = _of_uneven(job.axes.row, job.axes.pipeline, job.axes.chunks, micro_batches, *of_stages)
    return step - micro_batches * sum(sum(of_stage[stage]) for stage in place.stages)


@lru_cache(maxsize=256)  # the same at each place of a pipeline
def _of_uneven(
    name: Name, ranks: int, chunks: int, micro_batches: int, *of_stages: Any
) -> tuple[float, tuple[OfStage, ...]]:
    """Seconds of a step, and of its stages."""
    of_stage = tuple((float(f), float(i), float(w)) for f, i, w in stage_s(chunks, *of_stages))
    return step_s(name, ranks, micro_batches, of_stage), of_stage


def stage_s(
    chunks: int, blocks: Sequence[int], w: Work, forward_s: Num, backward_s: Num, exchange_s: Num
) -> list[tuple[Num, Num, Num]]:
    """By stage, seconds of a micro-batch's forward, and of its backward's input and weight part, with what
    it waits for messages.

    blocks: of each stage
    """
    send_s, last, found = exchange_s / 2 / chunks, len(blocks) - 1, dict[Any, Any]()
    stages = [(count, int(stage == last)) for stage, count in enumerate(blocks)]
    for count, heads in {*stages}:  # few differ
        weight = count * w.weight + heads * w.head_weight
        forward = count * forward_s + heads * w.head_forward + send_s
        backward = count * backward_s + heads * w.head_backward + send_s
        found[count, heads] = forward, backward - weight, weight
    return [found[stage] for stage in stages]
