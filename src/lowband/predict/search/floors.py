"""The least seconds of a step under any scheme, and below them a bound that takes a tenth of their time.

What computation, tensor parallelism and idle ranks take is the same under every scheme. Jobs that differ in
schedule and stages alone have most of it in common.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowband.cost.numbers import Num
from lowband.cost.timeline import idle_passes
from lowband.predict.time import COMPUTED, StepTime, step_time
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.schedules import SCHEDULES

ROUNDING = 1e-9
_BETWEEN = [name for name in Ways.model_fields if name not in ("chunks", "schedule", "layers")]
OF_TIERS = "stash", "host_update", "fetch"  # items that depend on where the optimizer's states are
BUSY = (
    "forward", "recompute", "backward", "straggler", "host", "tensor_parallel", "context", "experts", "stash",
    "fetch",
)  # fmt: skip


@dataclass(frozen=True)
class Floor:
    """Of each micro-batch of a job.

    least: seconds of a step under any scheme
    busy:  no less than those that a rank computes in the mean, with what blocks wait for: behind these
           collectives of sharding can hide
    """

    least: NDArray[np.float64]
    busy: NDArray[np.float64]


def floor(base: Workload) -> Floor:
    """The least seconds of a step: what it takes without collectives of sharding and copies of states beyond
    the device, of which each scheme has other shards.

    Of uneven stages: what they take in the mean, if none has a head. Where backwards are split, all but the
    first rank wait at least for a forward in each stage before theirs.
    """
    base, part = even(base)
    axes = base.axes
    splits = SCHEDULES[axes.row].splits
    whole = base if base.beyond is None else replace(base, beyond=None)
    if splits:
        whole = whole.varied(axes=axes.model_copy(update={"schedule": "1f1b"}))
    step = step_time(whole)
    least = _without_placement(step)
    if base.hides_sends and (splits or part < 1):  # they hide behind other lists, or behind longer stages
        least = least - step.items["pipeline_exchange"]
    if splits:
        least = least - step.items["bubble"]
        least = least + (axes.pipeline - 1) / axes.chunks * step.items["forward"] / base.accumulation
    busy = sum((step.items[name] for name in BUSY), start=0.0)
    shape = np.shape(base.micro_batch)
    return Floor(part * np.broadcast_to(least, shape), part * np.broadcast_to(busy, shape))


def _without_placement(step: StepTime) -> Num:
    """Seconds of a step without collectives of sharding, optimizer and tiers."""
    others = {name for name in step.items if name.startswith("exposed_")} | {"optimizer", *OF_TIERS}
    computed = sum((step.items[name] for name in COMPUTED), start=0.0)
    waits = step.items["straggler"] * step.items["optimizer"] / computed
    return step.total - sum((step.items[name] for name in others), start=0.0) - waits


class Bounds:
    """Below the floors of jobs, what those that differ in schedule and stages alone have in common: a step
    without head, sends between stages and idle time, and of the latter what is certain."""

    def __init__(self) -> None:
        self._alike: dict[tuple[object, ...], tuple[Num, Num, Num]] = {}

    def of(self, base: Workload) -> Floor:
        """The floor itself where layers differ and more of them would have another mean."""
        is_mixed = base.model.linear_layers or base.model.dense_layers
        if is_mixed and base.model.layers % base.axes.pipeline:
            return floor(base)
        axes = base.axes.model_copy(update={"schedule": "1f1b", "chunks": 1, "layers": ()})
        alike = (getattr(axes, name) for name in _BETWEEN)
        key = *alike, base.recompute, base.recomputed, np.asarray(base.micro_batch).tobytes()
        if key not in self._alike:
            self._alike[key] = _shared(base.varied(axes=axes, **_headless(base, axes.pipeline)))
        least, one_pass, forward = self._alike[key]
        own = base.axes
        if SCHEDULES[own.row].splits:
            idle = (own.pipeline - 1) / own.chunks * forward
        else:
            idle = idle_passes(own.pipeline, base.accumulation, own.chunks) * one_pass
        layers = -(-base.model.layers // own.pipeline) * own.pipeline
        part, shape = base.model.layers / layers, np.shape(base.micro_batch)
        above, below = least * part, (least + idle) * part * (1 - ROUNDING)
        return Floor(np.broadcast_to(below, shape), np.broadcast_to(above, shape))


def _headless(base: Workload, stages: int) -> dict[str, Any]:
    """The model with as many blocks in each stage, and next to no head."""
    layers = -(-base.model.layers // stages) * stages
    return {"model": base.model.model_copy(update={"layers": layers, "vocab": base.axes.tensor})}


def _shared(job: Workload) -> tuple[Num, Num, Num]:
    """Seconds of a step, and of a micro-batch's pass and its forward, whatever the schedule."""
    step = step_time(job)
    apart = step.items["bubble"] + step.items["pipeline_exchange"]
    of_pass = ("forward", "recompute", "backward", "host", "tensor_parallel")
    one_pass = sum((step.items[name] for name in of_pass), start=0.0) / job.accumulation
    return _without_placement(step) - apart, one_pass, step.items["forward"] / job.accumulation


def even(base: Workload) -> tuple[Workload, float]:
    """A job with as many blocks in each stage as in the longest one, and no head if they differ, and which
    part of its blocks there are."""
    model, axes = base.model, base.axes
    if not axes.is_uneven:
        return base, 1.0
    layers = axes.stages * max(axes.layers)
    larger = model.model_copy(update={"layers": layers, "vocab": axes.tensor})
    return base.varied(model=larger, axes=axes.model_copy(update={"layers": ()})), model.layers / layers
