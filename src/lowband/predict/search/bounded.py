"""Of all jobs of `lowband plan` under all placements, those that can be chosen or shown, predicted.

What computation, tensor parallelism and idle ranks take is the same under every placement (floors.py), and
what each waits for collectives at least is known before it is predicted (exposure.py). So the search leaves
out jobs whose activations alone have no room, and goes through the others in the order of a bound of this
floor. Of each it leaves out what is already beyond what its placement has been predicted to take, first by
the bound, then for want of memory (peaks.py), then by the floor itself.
Rows of equal time are in the same order however many candidates were left out (choice.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lowband.cost.numbers import Num
from lowband.predict.blocks import Known
from lowband.predict.room import surely
from lowband.predict.search.candidates import SHOWN, Candidate, Knobs, differ_in_one, knobs_of
from lowband.predict.search.exposure import Exposure, exposure
from lowband.predict.search.floors import ROUNDING, Bounds, Floor, floor
from lowband.predict.search.parts import are_free, chosen_parts
from lowband.predict.search.peaks import Peaks, capacity
from lowband.predict.search.placements import Table, placement, table
from lowband.predict.search.software import Software
from lowband.predict.time import step_time
from lowband.predict.workload import Workload
from lowband.spec.scheme import Scheme
from lowband.spec.step import Recompute

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass
class Search:
    """What `run` has been told to go through so far.

    bases:  jobs that differ in all but placement and wires, with their micro-batches as arrays
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
    found: dict[Knobs, Candidate] = field(default_factory=dict)
    tried: int = 0
    limits: dict[Knobs, float] = field(default_factory=dict)
    last_row: float = np.inf
    exact_best: float = np.inf
    _bounds: Bounds = field(default_factory=Bounds)
    _peaks: Peaks = field(default_factory=Peaks)
    _tables: dict[object, Table] = field(default_factory=dict)
    _exposures: dict[object, Exposure] = field(default_factory=dict)
    _mosts: dict[Table, Floats] = field(default_factory=dict)
    _apart: set[Knobs] = field(default_factory=set)  # whose parts have been chosen

    def run(self, bases: Sequence[Workload]) -> None:
        self.bases += bases
        self.tried += sum(map(self._count, bases))
        found = []
        for base in bases:
            room = self._or_all(np.asarray(self._peaks.least(base) <= capacity(base.machine)))
            if room.any():
                found.append((base, room))
        bounds = self._bounds.of_all([base for base, _ in found])
        fitting = [(_some(base, room), b.some(room)) for (base, room), b in zip(found, bounds, strict=True)]
        for base, bound in sorted(fitting, key=lambda each: each[1].first):
            if bound.first <= self._last(base) or np.isinf(self.within):
                self._predict_near(base, bound)

    @property
    def fits(self) -> bool:
        """Whether anything that was found does."""
        return any(not c.short_by for c in self.found.values())

    def near(self, recompute: Recompute) -> list[Workload]:
        """The jobs of a kind of recomputation that may still be as fast as what is shown."""
        of_kind = [base for base in self.bases if base.recompute == recompute]
        if np.isinf(self.last_row):
            return of_kind
        bounds = self._bounds.of_all(of_kind)
        return [base for base, b in zip(of_kind, bounds, strict=True) if b.first <= self.last_row]

    def predict_all(self) -> None:
        """What is short of memory by least is among them."""
        for base in self.bases:
            of_base = self._table(base)
            self._predict_any(base, of_base, self._takes(base, of_base))

    def around(self, best: Candidate) -> Mapping[Knobs, Candidate]:
        """Those that differ from one in a single choice, predicted if they have not been."""
        for base in self.bases:
            if not _near(base.varied(scheme=best.batches.scheme), best).any():
                continue
            if not (of_base := self._table(base)).schemes:  # that some software has
                continue
            near = np.array([_near(base.varied(scheme=one), best) for one in of_base.schemes], dtype=bool)
            self._predict_any(base, of_base, near & self._takes(base, of_base))
        return self.found

    def _predict_any(self, base: Workload, of_base: Table, which: Bools) -> None:
        """which: of each scheme, its micro-batches"""
        some = np.asarray(which.any(axis=0))
        if not some.any():
            return
        base, which = _some(base, some), which[:, some]
        (peak, short), known = self._peaks.under(base, of_base), Known()
        for i, scheme in enumerate(of_base.schemes):
            self._predict(base, scheme, which[i], peak[i], short[i], known)

    def _predict_near(self, base: Workload, bound: Floor) -> None:
        """Those of a job's candidates that may be near what has been found: what is soon known first."""
        of_base = self._table(base)
        near = self._near(base, of_base, bound)[1]
        if not near.any():
            return
        some = np.asarray(near.any(axis=0))
        base, near = _some(base, some), near[:, some]
        if base.axes.is_uneven:  # each rank's peak takes a while
            least_peak = self._peaks.least_under(base, of_base)
            may_fit = (least_peak <= capacity(base.machine)) | self._chooses_parts(base)
            near &= self._or_all(may_fit)
            if not near.any():
                return
            some = np.asarray(near.any(axis=0))
            base, near = _some(base, some), near[:, some]
        peak, short = self._peaks.under(base, of_base)
        near &= self._or_all((short == 0) | self._chooses_parts(base))  # with others they may have room
        if not near.any():
            return
        some = np.asarray(near.any(axis=0))
        base, fits, peak, short = _some(base, some), near[:, some], peak[:, some], short[:, some]
        least, near = self._near(base, of_base, floor(base))
        near &= fits
        known = Known()
        for i in np.flatnonzero(near.any(axis=1)):
            which = near[i] & (least[i] <= self._most(of_base.placed[i]))
            self._predict(base, of_base.schemes[i], which, peak[i], short[i], known)

    def _or_all(self, which: Bools) -> Bools:
        """A whole search leaves out nothing."""
        return np.ones_like(which) if np.isinf(self.within) else which

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

    def _last(self, base: Workload) -> float:
        """The most seconds of a candidate of a job that is to be found."""
        most = self._most_of(self._table(base))
        return min(self.last_row, float(most.max(initial=0.0)))

    def _most_of(self, of_base: Table) -> Floats:
        """The same of each scheme."""
        if of_base not in self._mosts:
            self._mosts[of_base] = np.array([self._most(key) for key in of_base.keys])[of_base.of_key]
        return self._mosts[of_base]

    def _table(self, base: Workload) -> Table:
        """The schemes under which some software has a job's states."""
        key = base.levels, base.is_in_stages, base.beyond and base.placed
        if key not in self._tables:
            self._tables[key] = table(base, self.software, self.exact)
        return self._tables[key]

    def _takes(self, base: Workload, of_base: Table) -> Bools:
        """Of each scheme, which of a job's micro-batches some of its software runs."""
        takers = np.full(np.shape(base.micro_batch), int(not self.software))  # bits, as holders
        for i, row in enumerate(self.software):
            if row.computes(base):
                takers |= row.takes(base).astype(np.int64) << i
        takes: Bools = of_base.holders[:, None] & takers > 0
        return takes

    def _count(self, base: Workload) -> int:
        """Of a job's candidates."""
        return int(np.count_nonzero(self._takes(base, self._table(base))))

    def _predict(
        self, base: Workload, scheme: Scheme, which: Bools, peak: Floats, short: Floats, known: Known
    ) -> None:
        """which: of its micro-batches; known: as `step_time` has it"""
        if not which.any():
            return
        micro_batch, accumulation = (
            np.asarray(each)[which] for each in (base.micro_batch, base.accumulation)
        )
        job = base.varied(scheme=scheme, micro_batch=micro_batch, accumulation=accumulation)
        if self._chooses_parts(job):
            self._predict_parts(job)
            return
        peak, short = peak[which], short[which]
        time, fits = np.full(np.shape(peak), np.inf), short == 0
        if fits.any():
            of_those = {"micro_batch": micro_batch[fits], "accumulation": accumulation[fits]}
            time[fits] = step_time(job.varied(**of_those), known=known).total
            self._note(placement(scheme), time, fits, surely(job.machine, peak) <= capacity(job.machine))
        for b, a, t, s, p in np.broadcast(job.micro_batch, job.accumulation, time, short, peak):
            knobs = knobs_of(job, micro_batch=int(b))
            self.found[knobs] = Candidate(knobs, job, int(b), int(a), float(t), float(s), float(p))

    def _chooses_parts(self, job: Workload) -> bool:
        return self.chooses and are_free(job)

    def _predict_parts(self, job: Workload) -> None:
        """What is chosen of a job's states beyond the device, of each micro-batch; once."""
        left = np.array(
            [knobs_of(job, micro_batch=int(b)) not in self._apart for b in np.ravel(job.micro_batch)]
        )
        if not left.any():
            return
        job = _some(job, left)
        found = chosen_parts(job, self.software)
        self._apart |= {knobs_of(job, micro_batch=one.micro_batch) for one in found}
        time, short, peak = (
            np.array([getattr(one, name) for one in found]) for name in ("step_time_s", "short_by", "peak")
        )
        if not short.all():
            is_sure = surely(job.machine, peak) <= capacity(job.machine)
            self._note(placement(job.scheme), np.where(short, np.inf, time), short == 0, is_sure)
        self.tried += len(found) - np.size(job.micro_batch)
        jobs = {beyond: job.varied(beyond=beyond) for beyond in {one.beyond for one in found}}
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


def _near(job: Workload, best: Candidate) -> Bools:
    """Which of a job's micro-batches differ from the candidate in one choice at most."""
    if job.beyond is not None:  # which parts of it there are follows from the other choices
        job = job.varied(beyond=best.batches.beyond)
    knobs = knobs_of(job, micro_batch=best.micro_batch)
    if knobs == best.knobs:
        return np.ones_like(job.micro_batch, dtype=bool)
    is_its: Bools = np.asarray(job.micro_batch) == best.micro_batch
    return is_its & differ_in_one(knobs, best.knobs)
