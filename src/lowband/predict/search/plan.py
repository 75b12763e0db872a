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

from lowband.cost.activations import Recompute
from lowband.cost.bytes import transfers
from lowband.cost.numbers import Num
from lowband.errors import UserError
from lowband.predict.footprint import GIB, memory_items, peak_bytes
from lowband.predict.search.candidates import (
    KNOBS,
    MEMORY_KNOBS,
    MODEL_ERROR,
    WIRES,
    Candidate,
    Knobs,
    Plan,
    differ_in_one,
    knobs_of,
)
from lowband.predict.search.degrees import axes_to_try, divisors, left_out, possible
from lowband.predict.search.software import Software
from lowband.predict.time import step_time
from lowband.predict.workload import ALL_WAYS, Workload, check_ways
from lowband.spec.axes import Ways
from lowband.spec.machine import Machine
from lowband.spec.mesh import Levels
from lowband.spec.model import ModelSpec
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
) -> Plan:
    """The candidates, predicted. Raises UserError if none is possible, or none fits.

    axes:          to try, in each schedule that the search has; None: all of `axes_to_try`
    micro_batches: to try; None: every one that is possible
    exact:         whether all wires are native
    ways:          in which ranks along context attend; those that cannot be are left out
    states:        how those of linear layers travel, as `in_ways` has it
    imbalance:     of experts, as Workload has it
    software:      of which one must run a candidate; none: any candidate is tried
    within:        of each placement with as many lossy wires, every candidate is found that is slower than
                   the fastest by at most this share; inf: all of them
    """
    check_ways(machine, ways)
    tried = possible(
        machine, model, ranks, axes or axes_to_try(machine, model), seq_len, ways, states
    )  # fmt: skip
    bases = list(
        _bases(machine, stack, model, ranks, seq_len, global_batch, tried, micro_batches, recompute, imbalance)
    )
    if not bases:
        given = f" x micro-batch {' or '.join(map(str, micro_batches))}" if micro_batches else ""
        raise UserError(
            f"a global batch of {global_batch} sequences is not divisible by any data-parallel degree of "
            f"{ranks} ranks{given}",
            allowed=f"a multiple of the data-parallel ranks{given}",
        )
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
    best:   by placement and lossy wires, the seconds of the fastest that fits
    """

    bases: Sequence[Workload]
    exact: bool
    software: tuple[Software, ...]
    within: float
    found: dict[Knobs, Candidate] = field(default_factory=dict)
    tried: int = 0
    best: dict[Knobs, float] = field(default_factory=dict)
    peaks: dict[Knobs, Num] = field(default_factory=dict)

    def run(self) -> None:
        floors = [_floor(base) for base in self.bases]
        for i in sorted(range(len(floors)), key=lambda i: floors[i]):
            for job, takes in self._placed(self.bases[i]):
                self.tried += int(np.sum(takes))
                known = self.best.get(_placement(job), np.inf)
                if floors[i] <= known * (1 + self.within):
                    self._predict(job, takes)

    def around(self, best: Candidate) -> Mapping[Knobs, Candidate]:
        """Those that differ from one in a single choice, predicted if they have not been."""
        of = {"micro_batch": best.micro_batch}
        for base in self.bases:
            if not _near(replace(base, scheme=best.batches.scheme), best, **of):
                continue
            for job, takes in self._placed(base):
                if knobs_of(job, **of) not in self.found and _near(job, best, **of):
                    self._predict(job, takes)
        return self.found

    def _placed(self, base: Workload) -> Iterator[tuple[Workload, Num]]:
        """A job under each scheme that some software runs, and which of its micro-batches that takes."""
        for scheme in schemes(base.levels, self.exact):
            job = replace(base, scheme=scheme)
            takes: Num = np.full(np.shape(base.micro_batch), not self.software)
            for row in self.software:
                if row.runs(job):
                    takes = takes | row.takes(job)
            if np.any(takes):
                yield job, takes

    def _predict(self, job: Workload, takes: Num) -> None:
        placed = knobs_of(job, MEMORY_KNOBS)  # wires are left out: they take no memory
        if placed not in self.peaks:
            self.peaks[placed] = peak_bytes(memory_items(job), job.keeps_grads)
        memory_gib = job.machine.device.memory_gib
        room = np.inf if memory_gib is None else memory_gib * GIB
        peak = self.peaks[placed]
        short = np.maximum(0.0, peak - room)
        fits = (short == 0) & takes
        time = step_time(job).total if np.any(fits) else np.inf
        if np.any(fits):
            key = _placement(job)
            fastest = float(np.min(np.where(fits, time, np.inf)))
            self.best[key] = min(fastest, self.best.get(key, np.inf))
        for b, a, t, s, p, takes_it in np.broadcast(
            job.micro_batch, job.accumulation, time, short, peak, takes
        ):
            if takes_it:
                knobs = knobs_of(job, micro_batch=int(b))
                self.found[knobs] = Candidate(knobs, job, int(b), int(a), float(t), float(s), float(p))


def _near(job: Workload, best: Candidate, micro_batch: int) -> bool:
    knobs = knobs_of(job, micro_batch=micro_batch)
    return knobs == best.knobs or differ_in_one(knobs, best.knobs)


def _placement(job: Workload) -> Knobs:
    """What `within` goes by."""
    lossy = sum(job.scheme.wire(name) != "native" for name in WIRES)
    return (*knobs_of(job, KNOBS[:4]), lossy)


def _floor(base: Workload) -> float:
    """The least seconds of a step under any scheme: what it takes without collectives of sharding."""
    step = step_time(base)
    beside = sum(
        (time for name, time in step.items.items() if name.startswith("exposed_") or name == "optimizer"),
        start=0.0,
    )
    return float(np.min(step.total - beside))


def _cannot_fit(machine: Machine, model: ModelSpec, least: Candidate) -> UserError:
    items = memory_items(least.job)
    largest = sorted(items.items(), key=lambda item: -float(item[1]))[:3]
    parts = ", ".join(f"{kind} {float(size) / GIB:.3g} GiB" for kind, size in largest)
    have = f"{least.job.ranks} x {machine.device.memory_gib:g} GiB"
    return UserError(
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
    """Every job of the search; each has its micro-batches as an array. Raises UserError for impossible axes."""
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
            accumulation=share // several, axes=way, imbalance=imbalance,
        )  # fmt: skip
        for each in recompute:
            if each != "selective" or base.attention == "plain":  # a fused kernel keeps no scores
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
