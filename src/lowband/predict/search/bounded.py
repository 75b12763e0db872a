"""Of all jobs of `lowband plan` under all placements, those that can be chosen or shown, predicted.

What computation, tensor parallelism and idle ranks take is the same under every placement (floors.py), and
what each waits for collectives at least is known before it is predicted (exposure.py). So the search goes
through the jobs in the order of a bound of this floor, and leaves out what is already beyond what its
placement has been predicted to take: first by the bound, then for want of room, then by the floor itself.
Rows of equal time are in the same order however many candidates were left out (choice.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lowband.cost.activations import Recompute
from lowband.cost.numbers import Num
from lowband.predict.footprint import GIB, Passes, items_under, memory_items, passes_of, peak_bytes
from lowband.predict.room import surely
from lowband.predict.search.candidates import SHOWN, Candidate, Knobs, differ_in_one, knobs_of
from lowband.predict.search.exposure import Exposure, exposure
from lowband.predict.search.floors import ROUNDING, Bounds, Floor, even, floor
from lowband.predict.search.parts import are_free, chosen_parts
from lowband.predict.search.placements import Table, placement, table
from lowband.predict.search.software import Software
from lowband.predict.tiers import short_by
from lowband.predict.time import step_time
from lowband.predict.workload import Workload
from lowband.spec.machine import Machine
from lowband.spec.scheme import Scheme

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass
class Search:
    """What `run` has been told to go through so far.

    bases:  jobs that differ in all but placement and wires, with their micro-batches as arrays; bounds: of
            each, below the least seconds of a step
    found:  what was predicted; tried: how many there are
    limits: by placement and lossy wires, the most seconds of what is chosen there; last_row: without lossy
            wires, of the last of the placements that are shown; exact_best: of the first
    chooses: whether parts of states beyond the device are chosen (parts.py), or all are there
    """

    exact: bool
    software: tuple[Software, ...]
    within: float
    chooses: bool = True
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
    _apart: set[Knobs] = field(default_factory=set)  # whose parts have been chosen

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
            if is_near and floor(base).least.min() <= self.last_row:
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
                knobs = knobs_of(job, micro_batch=best.micro_batch)
                if knobs not in self.found and knobs not in self._apart and _near(job, best):
                    self._predict(base, scheme, takes[i], peaks)
        return self.found

    def _predict_near(self, base: Workload, bound: Floor) -> None:
        """Those of a job's candidates that may be near what has been found: what is soon known first."""
        of_base = self._table(base)
        near = np.asarray(self._near(base, of_base, bound)[1].any(axis=0))
        if not near.any():
            return
        base = _some(base, near)
        room = self._has_room(base)
        if not room.any():
            return
        base = _some(base, room)
        least, near = self._near(base, of_base, floor(base))
        if not near.any():
            return
        some = np.asarray(near.any(axis=0))
        base, near, least = _some(base, some), near[:, some], least[:, some]
        peaks = Peaks(base)
        for i in np.flatnonzero(near.any(axis=1)):
            which = near[i] & (least[i] <= self._most(of_base.placed[i]))
            self._predict(base, of_base.schemes[i], which, peaks)

    def _near(self, base: Workload, of_base: Table, below: Floor) -> tuple[Floats, Bools]:
        """Of each scheme and micro-batch the least seconds, and whether that is near what has been found."""
        least = below.least + self._exposed(base, of_base, below)
        most = self._most_of(of_base)
        return least, self._takes(base, of_base) & (least <= most[:, None])

    def _exposed(self, base: Workload, of_base: Table, below: Floor) -> Floats:
        """The least seconds that a step waits for collectives of sharding."""
        if base.lora is not None:
            return np.zeros((len(of_base.schemes), below.least.size))
        axes = base.axes
        shards = of_base, axes.tensor, axes.pipeline, axes.expert, axes.has_both_ends, axes.is_uneven
        if shards not in self._exposures:
            self._exposures[shards] = exposure(base, of_base.schemes)
        blocks, gathers = base.model.layers / axes.pipeline, (1.0, 0.0) if axes.is_uneven else base.gathers
        return self._exposures[shards].least(base, blocks, gathers, below.busy) * (1 - ROUNDING)

    def _most(self, placed: Knobs) -> float:
        """The most seconds of a candidate that is to be found. With lossy wires it may gain on all without;
        or another, with more of them, be so little faster that it does not pay for these (choice.py)."""
        if np.isinf(self.within):
            return np.inf
        most = self.limits.get(placed, np.inf)
        if placed[-1]:
            return min(most, self.exact_best, self.last_row * (1 + self.within))
        return min(most, self.last_row)

    def _most_of(self, of_base: Table) -> Floats:
        """The same of each scheme."""
        if of_base not in self._mosts:
            self._mosts[of_base] = np.array([self._most(key) for key in of_base.keys])[of_base.of_key]
        return self._mosts[of_base]

    def _has_room(self, base: Workload) -> Bools:
        """Of each micro-batch, whether its activations and the optimizer's smallest shards leave room."""
        items, most = memory_items(even(base)[0]), max(base.axes.layers, default=1)
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
        if self.chooses and are_free(job):
            self._predict_parts(job)
            return
        peak, short = (each[which] for each in peaks.under(scheme))
        time, fits = np.full(np.shape(peak), np.inf), short == 0
        if fits.any():
            of_those = {"micro_batch": micro_batch[fits], "accumulation": accumulation[fits]}
            time[fits] = step_time(job.varied(**of_those)).total
            self._note(placement(scheme), time, fits, surely(job.machine, peak) <= _room(job.machine))
        for b, a, t, s, p in np.broadcast(job.micro_batch, job.accumulation, time, short, peak):
            knobs = knobs_of(job, micro_batch=int(b))
            self.found[knobs] = Candidate(knobs, job, int(b), int(a), float(t), float(s), float(p))

    def _predict_parts(self, job: Workload) -> None:
        """What is chosen of a job's states beyond the device, of each micro-batch."""
        found = chosen_parts(job, self.software)
        self._apart |= {knobs_of(job, micro_batch=one.micro_batch) for one in found}
        time, short, peak = (
            np.array([getattr(one, name) for one in found]) for name in ("step_time_s", "short_by", "peak")
        )
        if not short.all():
            is_sure = surely(job.machine, peak) <= _room(job.machine)
            self._note(placement(job.scheme), np.where(short, np.inf, time), short == 0, is_sure)
        self.tried += len(found) - np.size(job.micro_batch)
        jobs = {beyond: replace(job, beyond=beyond) for beyond in {one.beyond for one in found}}
        for one, t, s, p in zip(found, time, short, peak, strict=True):
            placed = jobs[one.beyond]
            knobs = knobs_of(placed, micro_batch=one.micro_batch)
            at = one.micro_batch, one.accumulation
            self.found[knobs] = Candidate(knobs, placed, *at, float(np.inf if s else t), float(s), float(p))

    def _note(self, placed: Knobs, time: Num, fits: Num, fits_surely: Num) -> None:
        """What is chosen of a placement is the fastest that surely fits, or at most `within` slower than the
        fastest that does."""
        fastest, safest = (float(np.min(np.where(which, time, np.inf))) for which in (fits, fits_surely))
        limit = min(fastest * (1 + self.within), safest)
        if limit >= self.limits.get(placed, np.inf):
            return
        self.limits[placed] = limit
        self._mosts.clear()
        rows = sorted(seconds for key, seconds in self.limits.items() if not key[-1])
        self.last_row = rows[SHOWN - 1] if len(rows) >= SHOWN else np.inf
        self.exact_best = rows[0] if rows else np.inf


def _some(base: Workload, which: Bools) -> Workload:
    """A job with some of its micro-batches."""
    if which.all():
        return base
    of = (np.asarray(each)[which] for each in (base.micro_batch, base.accumulation))
    return base.varied(**dict(zip(("micro_batch", "accumulation"), of, strict=True)))


def _near(job: Workload, best: Candidate) -> bool:
    """Whether a job with the candidate's micro-batch differs from it in one choice at most."""
    if job.beyond is not None:  # which parts of it there are follows from the other choices
        job = job.varied(beyond=best.batches.beyond)
    knobs = knobs_of(job, micro_batch=best.micro_batch)
    return knobs == best.knobs or differ_in_one(knobs, best.knobs)


def _room(machine: Machine) -> float:
    memory_gib = machine.device.memory_gib
    return np.inf if memory_gib is None else memory_gib * GIB


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
