"""For how long a pipeline's rank is idle in a step: by cost/timeline.py.

Where stages have equally many blocks they are taken as alike, and the head as if every rank computed it: the
last one sets the pace. Of uneven stages each has its own time, and the last one the head's.
"""

from collections.abc import Sequence

from lowband.cost.compute import Work
from lowband.cost.numbers import Num
from lowband.cost.timeline import idle_passes, idle_s, step_s
from lowband.predict.place import Place
from lowband.predict.stage_messages import Exchange
from lowband.predict.workload import Workload
from lowband.spec.schedules import SCHEDULES


def bubble_s(
    job: Workload, place: Place, w: Work, forward_s: Num, backward_s: Num, exchange: Exchange
) -> Num:
    """Seconds of a step for which the rank at a place is idle.

    forward_s, backward_s: of a micro-batch in one block, with what is beside the computation of `w`
    """
    if place.stages:
        return _uneven(job, place, w, forward_s, backward_s, exchange.mean)
    exchange_s = exchange.mean
    axes, pass_s = job.axes, place.blocks * (forward_s + backward_s)
    if not SCHEDULES[axes.row].splits:
        return idle_passes(axes.pipeline, job.accumulation, axes.chunks) * (pass_s + exchange_s)
    forward, weight = place.blocks * forward_s, place.blocks * w.weight
    input_s = pass_s - forward - weight + exchange_s / 2
    return idle_s(
        axes.row, axes.pipeline, job.accumulation, axes.chunks, forward + exchange_s / 2, input_s, weight
    )


def _uneven(job: Workload, place: Place, w: Work, forward_s: Num, backward_s: Num, exchange_s: Num) -> float:
    axes, micro_batches = job.axes, int(job.accumulation)
    of_stage = tuple(
        tuple(map(float, each)) for each in stage_s(job, place.of_stage, w, forward_s, backward_s, exchange_s)
    )
    busy = micro_batches * sum(sum(of_stage[stage]) for stage in place.stages)
    return step_s(axes.row, axes.pipeline, micro_batches, of_stage) - busy


def stage_s(
    job: Workload, blocks: Sequence[int], w: Work, forward_s: Num, backward_s: Num, exchange_s: Num
) -> list[tuple[Num, Num, Num]]:
    """By stage, seconds of a micro-batch's forward, and of its backward's input and weight part, with sends.

    blocks: of each stage
    """
    send_s, last, found = exchange_s / 2 / job.axes.chunks, len(blocks) - 1, []
    for stage, count in enumerate(blocks):
        heads = int(stage == last)
        weight = count * w.weight + heads * w.head_weight
        forward = count * forward_s + heads * w.head_forward + send_s
        backward = count * backward_s + heads * w.head_backward + send_s
        found.append((forward, backward - weight, weight))
    return found
