"""The search of `lowband plan`: placement x wires x micro-batch x recomputation x axes x schedule, what fits.

It covers these choices only:

    placements  every order weights <= grads <= optim of the levels, with every secondary inside weights
    wires       native or int8 for the two gathers, native or int4 for the reductions in and out of the grads
                level; a collective that sends nothing, or has one rank, keeps its native wire
    batches     every micro-batch (of those given) that divides a data-parallel group's share of the global
                batch; the rest is accumulation
    recompute   none, op, full (or those given), and selective where attention keeps its scores
    axes        and schedules: degrees.py

What computation, tensor parallelism and idle ranks take is the same under every placement, and the least
that a step can take. So the search goes through the jobs in the order of this floor, and leaves out those
whose floor is already beyond what their placement has been predicted to take.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lowband.cost.activations import Recompute
from lowband.cost.bytes import transfers
from lowband.cost.lora import Lora
from lowband.cost.numbers import Num
from lowband.cost.tiers import Beyond
from lowband.errors import UserError
from lowband.predict.footprint import GIB, memory_items, peak_bytes
from lowband.predict.room import DoesNotFit, surely
from lowband.predict.search.candidates import (
    KNOBS,
    MEMORY_KNOBS,
    MODEL_ERROR,
    SHOWN,
    WIRES,
    Candidate,
    Knobs,
    Plan,
    differ_in_one,
    knobs_of,
)
from lowband.predict.search.degrees import axes_to_try, divisors, left_out, possible
from lowband.predict.search.software import Software
from lowband.predict.tiers import short_by
from lowband.predict.time import step_time
from lowband.predict.workload import ALL_WAYS, Workload, check_ways
from lowband.spec.axes import Ways
from lowband.spec.machine import Machine
from lowband.spec.mesh import Levels
from lowband.spec.model import ModelSpec
from lowband.spec.schedules import SCHEDULES
from lowband.spec.scheme import Scheme
from lowband.spec.stack import Stack
from lowband.spec.step import States

RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "op", "full")
DDP = Scheme(name="ddp", weights="self", grads="self", optim="self")


def plan(
    machine: Machine,
    stack: Stack,
    model: ModelSpec,
    ranks: int,
    seq_len: int,
    global_batch: int,
    axes: Sequence[Ways] | None = None,
    micro_batches: Sequence[int] | None = None,
    recompute: Sequence[Recompute] = RECOMPUTE,
    exact: bool = False,
    ways: Sequence[str] = (ALL_WAYS,),
    states: Sequence[States] = (),
    imbalance: float = 1.0,
    software: Sequence[Software] = (),
    within: float = MODEL_ERROR,
    beyond: Beyond | None = None,
    lora: Lora | None = None,
) -> Plan:
    """The candidates, predicted. Raises UserError if none is possible, DoesNotFit if none fits.

    axes:          to try, in each schedule that the search has; None: all of `axes_to_try`
    micro_batches: to try; None: every one that is possible
    exact:         whether all wires are native
    ways:          in which ranks along context attend; those that cannot be are left out
    states:        how those of linear layers travel, as `in_ways` has it
    imbalance:     of experts, as Workload has it
    software:      of which one must run a candidate; none: any candidate is tried
    within:        the model's error, as `choice.chosen` has it: what is chosen with it is found for certain;
                   inf: all candidates are
    beyond:        the device, of every candidate, as Workload has it
    lora:          adapters, likewise
    """
    check_ways(machine, ways)
    tried = possible(
        machine, model, ranks, axes or axes_to_try(machine, model), seq_len, ways, states
    )  # fmt: skip
    job = machine, stack, model, ranks, seq_len, global_batch, tried, micro_batches, recompute
    bases = list(_bases(*job, imbalance, beyond, lora))
    if not bases:
        given = f" x micro-batch {' or '.join(map(str, micro_batches))}" if micro_batches else ""
        raise UserError(
            f"a global batch of {global_batch} sequences is not divisible by any data-parallel degree of "
            f"{ranks} ranks{given}",
            allowed=f"a multiple of the data-parallel ranks{given}",
        )
    if software:
        bases = [base for base in bases if any(row.computes(base) for row in software)]
    search = _Search(bases, exact, tuple(software), within)
    search.run()
    names = [row.name for row in software]
    if not search.found:
        raise UserError(f"{' and '.join(names)} cannot run any candidate", allowed="--software any")
    ranked = sorted(
        (c for c in search.found.values() if not c.short_by), key=lambda c: (c.step_time_s, c.peak)
    )
    if not ranked:
        raise _cannot_fit(machine, model, min(search.found.values(), key=lambda c: c.short_by))
    return Plan(ranked, search.found, left_out(model, tried, names), search.tried, search.around)


@dataclass
class _Search:
    """bases: jobs that differ in all but placement and wires, with their micro-batches as arrays.

    found:  what was predicted; tried: how many there are
    limits: by placement and lossy wires, the most seconds of what is chosen there; last_row: of the last of
            the placements that are shown; exact_best: of the fastest without lossy wires
    """

    bases: Sequence[Workload]
    exact: bool
    software: tuple[Software, ...]
    within: float
    found: dict[Knobs, Candidate] = field(default_factory=dict)
    tried: int = 0
    limits: dict[Knobs, float] = field(default_factory=dict)
    last_row: float = np.inf
    exact_best: float = np.inf
    peaks: dict[Knobs, tuple[Num, Num]] = field(default_factory=dict)

    def run(self) -> None:
        floors = [_floor(base) for base in self.bases]
        order = sorted(range(len(floors)), key=lambda i: floors[i].min())
        for i in order:
            base, near = self.bases[i], []
            if floors[i].min() > self.last_row and np.isfinite(self.within):  # as are all that follow
                self.tried += self._count(base)
                continue
            for scheme, takes in self._placed(base):
                self.tried += int(np.sum(takes))
                if floors[i].min() <= self._most(scheme):
                    near.append((scheme, takes))
            has_room = self._has_room(base) if near else np.array(False)
            for scheme, takes in near:
                self._predict(base, scheme, takes & has_room & (floors[i] <= self._most(scheme)))
        if not any(not c.short_by for c in self.found.values()):  # what is short of memory by least
            for i in order:
                for scheme, takes in self._placed(self.bases[i]):
                    self._predict(self.bases[i], scheme, takes)

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
                if row.places(scheme, base):
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
    """The least seconds of a step under any scheme: what it takes without collectives of sharding.

    Of uneven stages: what they take in the mean, if none has a head. Where backwards are split, all but the
    first rank wait at least for a forward in each stage before theirs.
    """
    base, part = _even(base)
    axes = base.axes
    splits = SCHEDULES[axes.row].splits
    whole = replace(base, axes=axes.model_copy(update={"schedule": "1f1b"})) if splits else base
    step = step_time(whole)
    others = {name for name in step.items if name.startswith("exposed_")} | {"optimizer"}
    if splits:
        others.add("bubble")
    least = step.total - sum((step.items[name] for name in others), start=0.0)
    if splits:
        least = least + (axes.pipeline - 1) / axes.chunks * step.items["forward"] / base.accumulation
    return part * np.broadcast_to(least, np.shape(base.micro_batch))


def _even(base: Workload) -> tuple[Workload, float]:
    """A job with as many blocks in each stage as in the longest one, and no head if they differ, and which
    part of its blocks there are."""
    model, axes = base.model, base.axes
    if not axes.is_uneven:
        return base, 1.0
    layers = axes.stages * max(axes.layers)
    larger = model.model_copy(update={"layers": layers, "vocab": axes.tensor})
    return replace(base, model=larger, axes=axes.model_copy(update={"layers": ()})), model.layers / layers


def _cannot_fit(machine: Machine, model: ModelSpec, least: Candidate) -> DoesNotFit:
    items = memory_items(least.job)
    largest = sorted(items.items(), key=lambda item: -float(item[1]))[:3]
    parts = ", ".join(f"{kind} {float(size) / GIB:.3g} GiB" for kind, size in largest)
    have = f"{least.job.ranks} x {machine.device.memory_gib:g} GiB"
    return DoesNotFit(
        f"'{model.name}' does not fit {have}: even the smallest scheme is {least.short_by / GIB:.3g} GiB "
        f"short per rank ({parts})"
    )


def jobs(
    machine: Machine,
    stack: Stack,
    model: ModelSpec,
    ranks: int,
    seq_len: int,
    global_batch: int,
    axes: Sequence[Ways],
    micro_batches: Sequence[int] | None = None,
    recompute: Sequence[Recompute] = RECOMPUTE,
    exact: bool = False,
) -> Iterator[Workload]:
    """Every job of the search; each has its micro-batches as an array.

    Raises UserError if no axes are possible.
    """
    tried = possible(machine, model, ranks, axes, seq_len, (ALL_WAYS,), ())
    for base in _bases(machine, stack, model, ranks, seq_len, global_batch, tried, micro_batches, recompute):
        for scheme in schemes(base.levels, exact):
            yield replace(base, scheme=scheme)


def _bases(
    machine: Machine,
    stack: Stack,
    model: ModelSpec,
    ranks: int,
    seq_len: int,
    global_batch: int,
    axes: Sequence[Ways],
    micro_batches: Sequence[int] | None,
    recompute: Sequence[Recompute],
    imbalance: float = 1.0,
    beyond: Beyond | None = None,
    lora: Lora | None = None,
) -> Iterator[Workload]:
    """Jobs in these axes and schedules, under DDP."""
    for way in axes:
        share, rest = divmod(global_batch, way.with_context(ranks)["data"])
        if rest:
            continue
        # As floats: a step of a trillion parameters has more FLOPs than 64 bits can count.
        batches = np.array([b for b in micro_batches or divisors(share) if share % b == 0], dtype=float)
        several = batches[batches < share] if way.schedule == "breadth-first" else batches
        if not several.size:
            continue
        base = Workload(
            machine, stack, model, DDP, ranks, micro_batch=several, seq_len=seq_len,
            accumulation=share // several, axes=way, imbalance=imbalance, beyond=beyond, lora=lora,
        )  # fmt: skip
        for each in recompute:
            if each != "selective" or base.stack.attention == "plain":  # a fused kernel keeps no scores
                yield replace(base, recompute=each)


@lru_cache(maxsize=64)
def schemes(levels: Levels, exact: bool = False) -> tuple[Scheme, ...]:
    """Every placement and its wires. Levels with no more ranks than the level inside them are left out.

    exact: whether all wires are native
    """
    found = []
    names = ["self", *(name for name in levels.names[1:] if _adds_ranks(levels, name))]
    for weights, grads, optim in itertools.combinations_with_replacement(names, 3):
        for secondary in (None, *names[: names.index(weights)]):
            placed = Scheme(name="plan", weights=weights, secondary=secondary, grads=grads, optim=optim)
            used = {t.collective.name for t in transfers(levels.world, False, placed, levels, "bf16", "bf16")}
            choices = [wires if name in used and not exact else wires[:1] for name, wires in WIRES.items()]
            for wires in itertools.product(*choices):
                found.append(placed.model_copy(update=dict(zip(WIRES, wires, strict=True))))
    return tuple(found)


def _adds_ranks(levels: Levels, name: str) -> bool:
    i = levels.index(name)
    return levels.sizes[i] > levels.sizes[i - 1]
