"""Of all jobs of `lowband plan` under all placements, those that can be chosen or shown, predicted.

What computation, tensor parallelism and idle ranks take is the same under every placement, and the least
that a step can take. So the search goes through the jobs in the order of this floor, and leaves out those
whose floor is already beyond what their placement has been predicted to take. Jobs that differ in schedule
and stages alone share most of their floor, below which is a bound that takes a tenth of its time: the floor
itself is worked out where the bound leaves the job in question.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowband.cost.activations import Recompute
from lowband.cost.numbers import Num
from lowband.cost.timeline import idle_passes
from lowband.predict.footprint import GIB, Passes, items_under, memory_items, passes_of, peak_bytes
from lowband.predict.room import surely
from lowband.predict.search.candidates import SHOWN, Candidate, Knobs, differ_in_one, knobs_of
from lowband.predict.search.exposure import Exposure, exposure
from lowband.predict.search.placements import Table, placement, table
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
BUSY = (
    "forward", "recompute", "backward", "straggler", "host", "tensor_parallel", "context", "experts", "stash",
    "fetch",
)  # fmt: skip
Floats, Bools = NDArray[np.float64], NDArray[np.bool_]


@dataclass
class Search:
    """What `run` has been told to go through so far.

    bases:  jobs that differ in all but placement and wires, with their micro-batches as arrays; bounds: of
            each, below the least seconds of a step
    found:  what was predicted; tried: how many there are
    limits: by placement and lossy wires, the most seconds of what is chosen there; last_row: of the last of
            the placements that are shown; exact_best: of the fastest without lossy wires
    """

    exact: bool
    software: tuple[Software, ...]
    within: float
    bases: list[Workload] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    found: dict[Knobs, Candidate] = field(default_factory=dict)
    tried: int = 0
    limits: dict[Knobs, float] = field(default_factory=dict)
    last_row: float = np.inf
    exact_best: float = np.inf
    _tables: dict[object, Table] = field(default_factory=dict)
    _exposures: dict[object, Exposure] = field(default_factory=dict)
    _mosts: dict[Table, Floats] = field(default_factory=dict)

    def run(self, bases: Sequence[Workload]) -> None:
        before, bounds = len(self.bases), Bounds()
        self.bases += bases
        found = [bounds.of(base) for base in bases]
        self.bounds += [float(bound.least.min()) for bound in found]
        for i in sorted(range(before, len(self.bases)), key=self.bounds.__getitem__):
            base, bound = self.bases[i], found[i - before]
            self.tried += self._count(base)
            if np.isinf(self.within) or self.bounds[i] <= self.last_row:
                self._predict_near(base, bound)

    @property
    def fits(self) -> bool:
        """Whether anything that was found does."""
        return any(not c.short_by for c in self.found.values())

    def near(self, recompute: Recompute) -> list[Workload]:
        """The jobs of a kind of recomputation that may still be as fast as what is shown."""
        found = []
        for i, base in enumerate(self.bases):
            is_near = base.recompute == recompute and self.bounds[i] <= self.last_row
            if is_near and _floor(base).least.min() <= self.last_row:
                found.append(base)
        return found

    def predict_all(self) -> None:
        """What is short of memory by least is among them."""
        for base in self.bases:
            of_base = self._table(base)
            takes, peaks = self._takes(base, of_base), Peaks(base)
            for i, scheme in enumerate(of_base.schemes):
                self._predict(base, scheme, takes[i], peaks)

    def around(self, best: Candidate) -> Mapping[Knobs, Candidate]:
        """Those that differ from one in a single choice, predicted if they have not been."""
        for base in self.bases:
            if not _near(replace(base, scheme=best.batches.scheme), best):
                continue
            of_base = self._table(base)
            takes, peaks = self._takes(base, of_base), Peaks(base)
            for i, scheme in enumerate(of_base.schemes):
                job = base.varied(scheme=scheme)
                if knobs_of(job, micro_batch=best.micro_batch) not in self.found and _near(job, best):
                    self._predict(base, scheme, takes[i], peaks)
        return self.found

    def _predict_near(self, base: Workload, bound: "Floor") -> None:
        """Those of a job's candidates that may be near what has been found: what takes least to say so first."""
        of_base = self._table(base)
        near = self._near(base, of_base, bound)[1].any(axis=0)
        if not near.any():
            return
        base = _some(base, near)
        room = self._has_room(base)
        if not room.any():
            return
        base = _some(base, room)
        least, near = self._near(base, of_base, _floor(base))
        if not near.any():
            return
        some = near.any(axis=0)
        base, near, least = _some(base, some), near[:, some], least[:, some]
        peaks = Peaks(base)
        for i in np.flatnonzero(near.any(axis=1)):
            which = near[i] & (least[i] <= self._most(of_base.placed[i]))
            self._predict(base, of_base.schemes[i], which, peaks)

    def _near(self, base: Workload, of_base: Table, floor: "Floor") -> tuple[Floats, Bools]:
        """Of each scheme and micro-batch the least seconds, and whether they may be near what has been found."""
        least = floor.least + self._exposed(base, of_base, floor)
        most = self._most_of(of_base)
        return least, self._takes(base, of_base) & (least <= most[:, None])

    def _exposed(self, base: Workload, of_base: Table, floor: "Floor") -> Floats:
        """The least seconds that a step waits for collectives of sharding."""
        if base.lora is not None:
            return np.zeros((len(of_base.schemes), floor.least.size))
        axes = base.axes
        shards = of_base, axes.tensor, axes.pipeline, axes.expert, axes.has_both_ends, axes.is_uneven
        if shards not in self._exposures:
            self._exposures[shards] = exposure(base, of_base.schemes)
        blocks, gathers = base.model.layers / axes.pipeline, (1.0, 0.0) if axes.is_uneven else base.gathers
        return self._exposures[shards].least(base, blocks, gathers, floor.busy) * (1 - ROUNDING)

    def _most(self, placed: Knobs) -> float:
        """The most seconds of a candidate that is to be found: of those that are shown, and with lossy wires
        it must gain on all without."""
        if np.isinf(self.within):
            return np.inf
        most = min(self.limits.get(placed, np.inf), self.last_row)
        return min(most, self.exact_best / (1 + self.within)) if placed[-1] else most

    def _most_of(self, of_base: Table) -> Floats:
        """The same of each scheme."""
        if of_base not in self._mosts:
            self._mosts[of_base] = np.array([self._most(key) for key in of_base.keys])[of_base.of_key]
        return self._mosts[of_base]

    def _has_room(self, base: Workload) -> Bools:
        """Of each micro-batch, whether its activations and the smallest shards of the optimizer's states leave
        room; of all, if all are to be found."""
        even, _ = _even(base)
        items, most = memory_items(even), max(base.axes.layers, default=1)
        kept = 1 - 1 / most if base.axes.is_uneven else 1  # a stage has at least so much of the longest one
        shards = items["optim"] / base.levels.world * (1 - ROUNDING)
        least = items["framework"] + kept * (items["activations"] + shards)
        return np.broadcast_to(
            (least <= _room(base.machine)) | np.isinf(self.within), np.shape(base.micro_batch)
        )

    def _table(self, base: Workload) -> Table:
        """The schemes under which some software has a job's states."""
        key = base.levels, base.is_in_stages, base.placed
        if key not in self._tables:
            self._tables[key] = table(base, self.software, self.exact)
        return self._tables[key]

    def _takes(self, base: Workload, of_base: Table) -> Bools:
        """Of each scheme, which of a job's micro-batches some of its software runs."""
        shape = len(of_base.schemes), np.size(base.micro_batch)
        if not self.software:
            return np.ones(shape, dtype=bool)
        takes = np.zeros(shape, dtype=bool)
        for i, row in enumerate(self.software):
            if row.computes(base):
                takes |= (of_base.holders >> i & 1).astype(bool)[:, None] & row.takes(base)
        return takes

    def _count(self, base: Workload) -> int:
        """Of a job's candidates."""
        return int(self._takes(base, self._table(base)).sum())

    def _predict(self, base: Workload, scheme: Scheme, which: Bools, peaks: "Peaks") -> None:
        """which: of its micro-batches"""
        if not which.any():
            return
        micro_batch, accumulation = (
            np.asarray(each)[which] for each in (base.micro_batch, base.accumulation)
        )
        job = base.varied(scheme=scheme, micro_batch=micro_batch, accumulation=accumulation)
        peak, short = (each[which] for each in peaks.under(scheme))
        time, fits = np.full(np.shape(peak), np.inf), short == 0
        if fits.any():
            of_those = {"micro_batch": micro_batch[fits], "accumulation": accumulation[fits]}
            time[fits] = step_time(job.varied(**of_those)).total
            self._note(placement(scheme), time, fits, surely(job.machine, peak) <= _room(job.machine))
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
        self._mosts.clear()
        rows: dict[Knobs, float] = {}
        for (*states, _), seconds in self.limits.items():
            rows[tuple(states)] = min(seconds, rows.get(tuple(states), np.inf))
        self.last_row = sorted(rows.values())[SHOWN - 1] if len(rows) >= SHOWN else np.inf
        self.exact_best = min((each for key, each in self.limits.items() if not key[-1]), default=np.inf)


def _some(base: Workload, which: Bools) -> Workload:
    """A job with some of its micro-batches."""
    if which.all():
        return base
    of = (np.asarray(each)[which] for each in (base.micro_batch, base.accumulation))
    return base.varied(**dict(zip(("micro_batch", "accumulation"), of, strict=True)))


def _near(job: Workload, best: Candidate) -> bool:
    """Whether a job with the candidate's micro-batch differs from it in one choice at most."""
    knobs = knobs_of(job, micro_batch=best.micro_batch)
    return knobs == best.knobs or differ_in_one(knobs, best.knobs)


def _room(machine: Machine) -> float:
    memory_gib = machine.device.memory_gib
    return np.inf if memory_gib is None else memory_gib * GIB


@dataclass(frozen=True)
class Floor:
    """Of each micro-batch of a job. least: seconds of a step under any scheme; busy: no less than those that a
    rank computes in the mean, with what blocks wait for, behind which collectives of sharding can hide"""

    least: Floats
    busy: Floats


class Peaks:
    """Of a job's micro-batches, the peak bytes under each placement, and by how much they are too many."""

    def __init__(self, base: Workload) -> None:
        self._base, self._of_states = base, dict[Knobs, tuple[Floats, Floats]]()

    @cached_property
    def _passes(self) -> Passes:
        return passes_of(self._base)

    def under(self, scheme: Scheme) -> tuple[Floats, Floats]:
        base, states = self._base, placement(scheme)[:-1]  # wires take no memory
        if states not in self._of_states:
            items = items_under(scheme, self._passes)
            peak = peak_bytes(items, base.keeps_grads)
            short = np.maximum(short_by(base, items), peak - _room(base.machine))
            shape = np.shape(base.micro_batch)
            self._of_states[states] = np.broadcast_to(peak, shape), np.broadcast_to(short, shape)
        return self._of_states[states]


def _floor(base: Workload) -> Floor:
    """The least seconds of a step: what it takes without collectives of sharding and copies of states beyond
    the device, of which each scheme has other shards.

    Of uneven stages: what they take in the mean, if none has a head. Where backwards are split, all but the
    first rank wait at least for a forward in each stage before theirs.
    """
    base, part = _even(base)
    axes = base.axes
    splits = SCHEDULES[axes.row].splits
    whole = base if base.beyond is None else replace(base, beyond=None)
    if splits:
        whole = whole.varied(axes=axes.model_copy(update={"schedule": "1f1b"}))
    step = step_time(whole)
    least = _without_placement(step)
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
        self._alike: dict[Knobs, tuple[Num, Num, Num]] = {}

    def of(self, base: Workload) -> Floor:
        """The floor itself where layers differ and more of them would have another mean."""
        is_mixed = base.model.linear_layers or base.model.dense_layers
        if is_mixed and base.model.layers % base.axes.pipeline:
            return _floor(base)
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


def _even(base: Workload) -> tuple[Workload, float]:
    """A job with as many blocks in each stage as in the longest one, and no head if they differ, and which
    part of its blocks there are."""
    model, axes = base.model, base.axes
    if not axes.is_uneven:
        return base, 1.0
    layers = axes.stages * max(axes.layers)
    larger = model.model_copy(update={"layers": layers, "vocab": axes.tensor})
    return base.varied(model=larger, axes=axes.model_copy(update={"layers": ()})), model.layers / layers
