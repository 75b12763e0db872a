"""The least seconds of a step under any scheme, and below them a bound that takes a tenth of their time.

What computation, tensor parallelism and idle ranks take is the same under every scheme. Jobs that differ in
schedule and stages alone have most of it in common.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from lowband.cost.numbers import Num
from lowband.cost.stages_step import place_of
from lowband.cost.timeline import idle_passes
from lowband.predict.blocks import ends_s
from lowband.predict.time import COMPUTED, StepTime, passes_s, step_time
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.mesh import SELF, WORLD
from lowband.spec.model import ModelSpec
from lowband.spec.schedules import SCHEDULES, Name
from lowband.spec.scheme import Scheme

ROUNDING = 1e-9
SMALLEST = Scheme(name="plan", weights=SELF, grads=SELF, optim=WORLD)
OF_PASS = "forward", "recompute", "backward", "host", "tensor_parallel"
SHARED = *OF_PASS, "straggler", "context", "experts"
_BETWEEN = [name for name in Ways.model_fields if name not in ("chunks", "schedule", "layers")]
_SECONDS = "step", "ends", "one_pass", "forward"  # of _Shared
OF_TIERS = "stash", "host_update", "fetch"  # items that depend on where the optimizer's states are
BUSY = (
    "forward", "recompute", "backward", "straggler", "host", "tensor_parallel", "context", "experts", "stash",
    "fetch",
)  # fmt: skip


@dataclass(frozen=True)
class Floor:
    """Of each micro-batch of a job.

    least: seconds of a step under any scheme
    busy:  seconds, in the mean over ranks, behind which collectives of sharding can hide: no less than
           `least` counts of computation and of waiting in blocks. `Bounds` counts no head and no copies of
           activations in either; `floor` leaves them out where stages differ. Nothing that is left out of
           both hides more than it takes itself, so the sum stays below a step
    """

    least: NDArray[np.float64]
    busy: NDArray[np.float64]

    @property
    def first(self) -> float:
        """Of all micro-batches."""
        return float(self.least.min())

    def some(self, which: NDArray[np.bool_]) -> "Floor":
        return Floor(self.least[which], self.busy[which])


@dataclass(frozen=True)
class _Shared:
    """Seconds that are the same under any scheme and schedule, of a rank with so many blocks.

    step:     of a step, without idle time and messages between stages
    ends:     of it, what the ranks with embeddings and head wait for along tensor
    one_pass: of a micro-batch in all blocks; forward: of it
    """

    step: Num
    ends: Num
    one_pass: Num
    forward: Num
    blocks: int

    @staticmethod
    def of(job: Workload, items: Mapping[str, Num]) -> "_Shared":
        """job: without a head, whose seconds are not those of blocks; items: of its step"""
        ends = job.accumulation * ends_s(job)
        passes = sum((items[name] for name in OF_PASS), start=0.0) - ends
        return _Shared(
            sum((items[name] for name in SHARED), start=0.0), ends,
            passes / job.accumulation, items["forward"] / job.accumulation,
            job.model.layers // job.axes.pipeline,
        )  # fmt: skip


def floor(base: Workload) -> Floor:
    """The least seconds of a step: what it takes without collectives of sharding and copies of states beyond
    the device, of which each scheme has other shards. A tied head's gradient is exchanged in the smallest.

    Where backwards are split, all but the first rank wait at least for a forward in each stage before theirs.
    """
    job, part = even(base)
    axes, splits = job.axes, SCHEDULES[job.axes.row].splits
    whole = job.varied(scheme=SMALLEST, beyond=None)
    if splits:
        whole = whole.varied(axes=axes.model_copy(update={"schedule": "1f1b"}))
    step = step_time(whole)
    least = _without_placement(step)
    if splits or part < 1:
        least = least - step.items["bubble"]
        if base.hides_sends:  # they hide behind other lists, or behind longer stages
            least = least - step.items["pipeline_exchange"]
    if part < 1:
        shared = _Shared.of(whole, step.items)
        least = part * (least - shared.ends) + _idle_s(base, shared)
    elif splits:
        headless = whole.varied(model=_headless(whole.model, axes.pipeline, axes.tensor))
        least = least + _idle_s(base, _Shared.of(headless, passes_s(headless)))
    busy = part * sum((step.items[name] for name in BUSY), start=0.0)
    shape = np.shape(base.micro_batch)
    return Floor(np.broadcast_to(least, shape), np.broadcast_to(busy, shape))


def _idle_s(base: Workload, shared: _Shared) -> Num:
    """Seconds that a step takes beyond what the mean rank computes.

    Of uneven stages every rank computes its own blocks, and waits before the first of them for a forward in
    each stage before it, and behind the last one for these stages' backwards, of which parts may come early.
    """
    axes, many = base.axes, base.accumulation
    splits = SCHEDULES[axes.row].splits
    if not axes.is_uneven:
        if splits:
            return (axes.pipeline - 1) / axes.chunks * shared.forward
        return idle_passes(axes.pipeline, many, axes.chunks) * shared.one_pass
    mean, before = base.model.layers / axes.pipeline, shared.forward if splits else shared.one_pass
    found: Num = 0.0
    for blocks, ahead in _waiting(axes.row, axes.pipeline, axes.layers):
        more = many * (blocks - mean) * shared.one_pass + ahead * before
        found = np.maximum(found, more / shared.blocks)
    return found


@cache
def by_rank(row: Name, ranks: int, layers: tuple[int, ...]) -> list[list[int]]:
    """Of each rank along a pipeline of uneven stages, the blocks of its stages."""
    found: list[list[int]] = [[] for _ in range(ranks)]
    for stage, blocks in enumerate(layers):
        found[place_of(row, stage, ranks)].append(blocks)
    return found


@cache
def _waiting(row: Name, ranks: int, layers: tuple[int, ...]) -> list[tuple[int, int]]:
    """Blocks of a rank of uneven stages, and those of the stages before its first one: of ranks with as many
    of their own the last one, which waits for longest."""
    own = [sum(blocks) for blocks in by_rank(row, ranks, layers)]
    return list(dict(zip(own, accumulate(layers, initial=0), strict=False)).items())


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
        self._alike: dict[tuple[object, ...], dict[float, _Shared]] = {}  # by how much is recomputed

    def of_all(self, bases: Sequence[Workload]) -> list[Floor]:
        """Of each. What is recomputed in part takes one array of all parts, instead of a step for each."""
        parts: dict[tuple[object, ...], tuple[Workload, dict[float, None]]] = {}
        for base in bases:
            if not _is_mixed(base) and base.recomputed not in self._alike.setdefault(key := _key(base), {}):
                parts.setdefault(key, (base, {}))[1][base.recomputed] = None
        for key, (base, recomputed) in parts.items():
            self._alike[key] |= _shared(base, recomputed)
        return [self._of(base) for base in bases]

    def of(self, base: Workload) -> Floor:
        return self.of_all([base])[0]

    def _of(self, base: Workload) -> Floor:
        """The floor itself where layers differ and more of them would have another mean."""
        if _is_mixed(base):
            return floor(base)
        shared = self._alike[_key(base)][base.recomputed]
        part = base.model.layers / base.axes.pipeline / shared.blocks
        above = shared.step * part
        ends = shared.ends if base.axes.is_uneven else 0.0
        below = (above - part * ends + _idle_s(base, shared)) * (1 - ROUNDING)
        return Floor(np.asarray(below), np.asarray(above))


def _is_mixed(base: Workload) -> bool:
    is_mixed = base.model.linear_layers or base.model.dense_layers
    return bool(is_mixed and base.model.layers % base.axes.pipeline)


def _key(base: Workload) -> tuple[object, ...]:
    return base.levels.names, between(base.axes), base.recompute, np.asarray(base.micro_batch).tobytes()


def _shared(base: Workload, recomputed: Iterable[float]) -> dict[float, _Shared]:
    """By how much is recomputed, what a job has in common with others."""
    axes = base.axes.model_copy(update={"schedule": "1f1b", "chunks": 1, "layers": ()})
    parts = [*recomputed]
    job = base.varied(
        axes=axes,
        model=_headless(base.model, axes.pipeline, axes.tensor),
        recomputed=np.array(parts)[:, None],
    )
    of_all = _Shared.of(job, passes_s(job))
    shape = len(parts), *np.shape(base.micro_batch)
    seconds = {name: np.broadcast_to(getattr(of_all, name), shape) for name in _SECONDS}
    return {
        part: replace(of_all, **{name: time[i] for name, time in seconds.items()})
        for i, part in enumerate(parts)
    }


def between(axes: Ways) -> tuple[object, ...]:
    """What jobs have in common that differ in schedule and stages alone."""
    return tuple(getattr(axes, name) for name in _BETWEEN)


def _headless(model: ModelSpec, stages: int, tensor: int) -> ModelSpec:
    """As many blocks in each stage, and next to no head."""
    layers = -(-model.layers // stages) * stages
    return model.model_copy(update={"layers": layers, "vocab": tensor})


def even(base: Workload) -> tuple[Workload, float]:
    """A job with as many blocks in each stage as in the longest one, and no head if they differ, and which
    part of its blocks there are."""
    model, axes = base.model, base.axes
    if not axes.is_uneven:
        return base, 1.0
    layers = axes.stages * max(axes.layers)
    larger = model.model_copy(update={"layers": layers, "vocab": axes.tensor})
    return base.varied(model=larger, axes=axes.model_copy(update={"layers": ()})), model.layers / layers
