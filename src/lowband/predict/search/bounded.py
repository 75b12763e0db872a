"""Of all jobs of `lowband plan` under all placements, those that can be chosen or shown, predicted.

What computation, tensor parallelism and idle ranks take is the same under every placement, and the least
that a step can take. So the search goes through the jobs in the order of this floor, and leaves out those
whose floor is already beyond what their placement has been predicted to take. Jobs that differ in schedule
and stages alone share most of their floor, below which is a bound that takes a tenth of its time: the floor
itself is worked out where the bound leaves the job in question.
"""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowband.cost.numbers import Num
from lowband.cost.timeline import idle_passes
from lowband.predict.footprint import GIB, memory_items, peak_bytes
from lowband.predict.room import surely
from lowband.predict.search.candidates import (
    KNOBS,
    MEMORY_KNOBS,
    SHOWN,
    WIRES,
    Candidate,
    Knobs,
    differ_in_one,
    knobs_of,
)
from lowband.predict.search.placements import schemes
from lowband.predict.search.software import Software
from lowband.predict.tiers import short_by
from lowband.predict.time import COMPUTED, StepTime, step_time
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.machine import Machine
from lowband.spec.schedules import SCHEDULES
from lowband.spec.scheme import Scheme

ROUNDING = 1e-9
_BETWEEN = [name for name in Ways.model_fields if name not in ("chunks", "schedule", "layers")]
OF_TIERS = "stash", "host_update", "fetch"  # items that depend on where the optimizer's states are


@dataclass
class Search:
    """What `run` has been told to go through so far.

    bases:  jobs that differ in all but placement and wires, with their micro-batches as arrays; least: of
            each the least seconds of a step
    found:  what was predicted; tried: how many there are
    limits: by placement and lossy wires, the most seconds of what is chosen there; last_row: of the last of
            the placements that are shown; exact_best: of the fastest without lossy wires
    """

    exact: bool
    software: tuple[Software, ...]
    within: float
    bases: list[Workload] = field(default_factory=list)
    least: list[float] = field(default_factory=list)
    found: dict[Knobs, Candidate] = field(default_factory=dict)
    tried: int = 0
    limits: dict[Knobs, float] = field(default_factory=dict)
    last_row: float = np.inf
    exact_best: float = np.inf
    peaks: dict[Knobs, tuple[Num, Num]] = field(default_factory=dict)

    def run(self, bases: Sequence[Workload]) -> None:
        before, bounds = len(self.bases), Bounds()
        floors = dict[int, NDArray[np.float64]]()
        self.bases += bases
        self.least += [bounds.of(base) for base in bases]
        queue = [(least, False, i) for i, least in enumerate(self.least[before:])]
        heapq.heapify(queue)
        while queue:
            least, is_floor, i = heapq.heappop(queue)
            base, near = bases[i], []
            if least > self.last_row and np.isfinite(self.within):  # as are all that follow
                self.tried += self._count(base)
                continue
            if not is_floor:
                floors[i] = _floor(base)
                self.least[before + i] = float(floors[i].min())
                heapq.heappush(queue, (self.least[before + i], True, i))
                continue
            for scheme, takes in self._placed(base):
                self.tried += int(np.sum(takes))
                if floors[i].min() <= self._most(scheme):
                    near.append((scheme, takes))
            has_room = self._has_room(base) if near else np.array(False)
            for scheme, takes in near:
                self._predict(base, scheme, takes & has_room & (floors[i] <= self._most(scheme)))

    @property
    def fits(self) -> bool:
        """Whether anything that was found does."""
        return any(not c.short_by for c in self.found.values())

    def near(self) -> list[Workload]:
        """The jobs that may still be as fast as what is shown."""
        return [base for base, least in zip(self.bases, self.least, strict=True) if least <= self.last_row]

    def predict_all(self) -> None:
        """What is short of memory by least is among them."""
        for base in self.bases:
            for scheme, takes in self._placed(base):
                self._predict(base, scheme, takes)

    def _most(self, scheme: Scheme) -> float:
        """The most seconds of a candidate that is to be found: of those that are shown, and with lossy wires
        it must gain on all without."""
        if np.isinf(self.within):
            return np.inf
        *_, lossy = placed = _placement(scheme)
        most = min(self.limits.get(placed, np.inf), self.last_row)
        return min(most, self.exact_best / (1 + self.within)) if lossy else most

    def _has_room(self, base: Workload) -> NDArray[np.bool_]:
        """Of each micro-batch, whether its activations leave room; of all, if all are to be found."""
        even, _ = _even(base)
        items, most = memory_items(even), max(base.axes.layers, default=1)
        kept = 1 - 1 / most if base.axes.is_uneven else 1  # a stage has at least so much of the longest one
        least = items["framework"] + kept * items["activations"]
        return np.broadcast_to(
            (least <= _room(base.machine)) | np.isinf(self.within), np.shape(base.micro_batch)
        )

    def around(self, best: Candidate) -> Mapping[Knobs, Candidate]:
        """Those that differ from one in a single choice, predicted if they have not been."""
        for base in self.bases:
            if not _near(replace(base, scheme=best.batches.scheme), best):
                continue
            for scheme, takes in self._placed(base):
                job = replace(base, scheme=scheme)
                if knobs_of(job, micro_batch=best.micro_batch) not in self.found and _near(job, best):
                    self._predict(base, scheme, takes)
        return self.found

    def _placed(self, base: Workload) -> Iterator[tuple[Scheme, NDArray[np.bool_]]]:
        """The schemes under which some software runs a job, and which of its micro-batches that takes."""
        running = [(row, row.takes(base)) for row in self.software if row.computes(base)]
        for scheme in schemes(base.levels, self.exact):
            takes = np.full(np.shape(base.micro_batch), not self.software)
            for row, by_row in running:
                if row.holds(scheme, base):
                    takes = takes | by_row
            if takes.any():
                yield scheme, takes

    def _count(self, base: Workload) -> int:
        """Of a job's candidates."""
        if not self.software:
            return len(schemes(base.levels, self.exact)) * np.size(base.micro_batch)
        return sum(int(np.sum(takes)) for _, takes in self._placed(base))

    def _predict(self, base: Workload, scheme: Scheme, which: NDArray[np.bool_]) -> None:
        """which: of its micro-batches"""
        if not which.any():
            return
        micro_batch, accumulation = (
            np.asarray(each)[which] for each in (base.micro_batch, base.accumulation)
        )
        job = replace(base, scheme=scheme, micro_batch=micro_batch, accumulation=accumulation)
        placed = (*knobs_of(job, MEMORY_KNOBS), *micro_batch)  # wires are left out: they take no memory
        if placed not in self.peaks:
            items = memory_items(job)
            of_device = peak_bytes(items, job.keeps_grads)
            self.peaks[placed] = of_device, np.maximum(short_by(job, items), of_device - _room(job.machine))
        peak, short = self.peaks[placed]
        time: Num = np.inf
        if np.any(short == 0):
            time = step_time(job).total
            self._note(_placement(scheme), time, short == 0, surely(job.machine, peak) <= _room(job.machine))
        for b, a, t, s, p in np.broadcast(job.micro_batch, job.accumulation, time, short, peak):
            knobs = knobs_of(job, micro_batch=int(b))
            self.found[knobs] = Candidate(knobs, job, int(b), int(a), float(t), float(s), float(p))

    def _note(self, placed: Knobs, time: Num, fits: Num, fits_surely: Num) -> None:
        """What is chosen of a placement is the fastest that surely fits, or at most `within` slower than the
        fastest that does."""
        fastest, safest = (float(np.min(np.where(which, time, np.inf))) for which in (fits, fits_surely))
        limit = min(fastest * (1 + self.within), safest)
        if limit >= self.limits.get(placed, np.inf):
            return
        self.limits[placed] = limit
        rows: dict[Knobs, float] = {}
        for (*states, _), seconds in self.limits.items():
            rows[tuple(states)] = min(seconds, rows.get(tuple(states), np.inf))
        self.last_row = sorted(rows.values())[SHOWN - 1] if len(rows) >= SHOWN else np.inf
        self.exact_best = min((each for key, each in self.limits.items() if not key[-1]), default=np.inf)


def _near(job: Workload, best: Candidate) -> bool:
    """Whether a job with the candidate's micro-batch differs from it in one choice at most."""
    knobs = knobs_of(job, micro_batch=best.micro_batch)
    return knobs == best.knobs or differ_in_one(knobs, best.knobs)


def _placement(scheme: Scheme) -> Knobs:
    """What `within` goes by."""
    lossy = sum(scheme.wire(name) != "native" for name in WIRES)
    return (*(getattr(scheme, name) for name in KNOBS[:4]), lossy)


def _room(machine: Machine) -> float:
    memory_gib = machine.device.memory_gib
    return np.inf if memory_gib is None else memory_gib * GIB


def _floor(base: Workload) -> NDArray[np.float64]:
    """The least seconds of a step under any scheme: what it takes without collectives of sharding and copies
    of states beyond the device, of which each scheme has other shards.

    Of uneven stages: what they take in the mean, if none has a head. Where backwards are split, all but the
    first rank wait at least for a forward in each stage before theirs.
    """
    base, part = _even(base)
    axes = base.axes
    splits = SCHEDULES[axes.row].splits
    whole = replace(base, beyond=None)
    if splits:
        whole = replace(whole, axes=axes.model_copy(update={"schedule": "1f1b"}))
    step = step_time(whole)
    least = _without_placement(step)
    if base.hides_sends and (splits or part < 1):  # they hide behind other lists, or behind longer stages
        least = least - step.items["pipeline_exchange"]
    if splits:
        least = least - step.items["bubble"]
        least = least + (axes.pipeline - 1) / axes.chunks * step.items["forward"] / base.accumulation
    return part * np.broadcast_to(least, np.shape(base.micro_batch))


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
        self._alike: dict[Knobs, tuple[Num, Num, Num]] = {}

    def of(self, base: Workload) -> float:
        """Seconds, of the fastest of its micro-batches; 0 where nothing is known."""
        if base.model.linear_layers or base.model.dense_layers:  # of which the mean block depends on stages
            return 0.0
        axes = base.axes.model_copy(update={"schedule": "1f1b", "chunks": 1, "layers": ()})
        alike = (getattr(axes, name) for name in _BETWEEN)
        key = *alike, base.recompute, base.recomputed, np.asarray(base.micro_batch).tobytes()
        if key not in self._alike:
            self._alike[key] = _shared(replace(base, axes=axes, **_headless(base, axes.pipeline)))
        least, one_pass, forward = self._alike[key]
        own = base.axes
        if SCHEDULES[own.row].splits:
            idle = (own.pipeline - 1) / own.chunks * forward
        else:
            idle = idle_passes(own.pipeline, base.accumulation, own.chunks) * one_pass
        layers = -(-base.model.layers // own.pipeline) * own.pipeline
        return float(np.min((least + idle) * (base.model.layers / layers))) * (1 - ROUNDING)


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


def _even(base: Workload) -> tuple[Workload, float]:
    """A job with as many blocks in each stage as in the longest one, and no head if they differ, and which
    part of its blocks there are."""
    model, axes = base.model, base.axes
    if not axes.is_uneven:
        return base, 1.0
    layers = axes.stages * max(axes.layers)
    larger = model.model_copy(update={"layers": layers, "vocab": axes.tensor})
    return replace(base, model=larger, axes=axes.model_copy(update={"layers": ()})), model.layers / layers
