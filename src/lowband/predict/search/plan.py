"""The search of `lowband plan`: placement x wires x micro-batch x recomputation x axes x schedule, what fits.

It covers these choices only:

    placements  every order weights <= grads <= optim of the levels, with every secondary inside weights
    wires       native or int8 for the two gathers, native or int4 for the reductions in and out of the grads
                level; a collective that sends nothing, or has one rank, keeps its native wire
    batches     every micro-batch (of those given) that divides a data-parallel group's share of the global
                batch; the rest is accumulation
    recompute   none, full (or the one given)
    axes        those given (or every power of two to the node's size, and to 16 stages) that divide the
                model; context is 1 unless degrees are given, and then in every way, or those given, for the
                levels that it crosses; expert likewise, and then by every route, or those given, with
                each of the numbers of copies
    schedule    on one rank along pipeline the order of accumulation: depth (1f1b), breadth (breadth-first)
                where a step has several micro-batches; on several every schedule that is predicted, with
                every power of two of stages a rank, to 8, that the model and the schedule allow, or
                the stages whose blocks are given

Left out, as `left_out` says: ranks along context without zigzag; an embedding that two ranks share, which is
not predicted.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import get_args

import numpy as np

from lowband.cost.activations import Recompute
from lowband.cost.bytes import transfers
from lowband.cost.numbers import Num
from lowband.errors import UserError
from lowband.predict.footprint import GIB, memory_items, peak_bytes
from lowband.predict.time import step_time
from lowband.predict.workload import ALL_WAYS, Workload, check_ways, in_ways, mesh_of
from lowband.spec.axes import SHORT_ALL, Ways, to_experts
from lowband.spec.context import check_layout, layout_of
from lowband.spec.machine import Machine
from lowband.spec.mesh import Levels
from lowband.spec.model import ModelSpec
from lowband.spec.schedules import SCHEDULES
from lowband.spec.scheme import Scheme
from lowband.spec.stack import Stack
from lowband.spec.step import STEP, Route, Schedule, States
from lowband.spec.wire import Wire

RECOMPUTE: tuple[Recompute, ...] = ("none", "full")
WIRES: dict[str, tuple[Wire, Wire]] = {row.name: ("native", row.coded) for row in STEP if row.coded}
MOST_STAGES, MOST_CHUNKS = 16, 8
COPIES = 1, 2, 4, 8  # of popular experts, where ranks are unevenly full
MEMORY_KNOBS = (
    "weights", "secondary", "grads", "optim", "recompute", "tensor", "context", "context_attention",
    "context_states", "expert", "route", "copies", "pipeline", "schedule", "chunks",
)  # fmt: skip
KNOBS = (*MEMORY_KNOBS[:4], *WIRES, "micro_batch", *MEMORY_KNOBS[4:])


@dataclass(frozen=True)
class Candidate:
    """One point of the search. short_by: bytes by which memory is too small; 0 if it fits."""

    knobs: tuple[object, ...]  # in the order of KNOBS
    batches: Workload  # the job with all micro-batches, as arrays
    micro_batch: int
    accumulation: int
    step_time_s: float
    short_by: float

    @property
    def job(self) -> Workload:
        return replace(self.batches, micro_batch=self.micro_batch, accumulation=self.accumulation)


@dataclass(frozen=True)
class Plan:
    """ranked: the candidates that fit, fastest first; candidates: all of them, by their knobs.

    left_out: what was not tried, and why, in one line
    """

    ranked: list[Candidate]
    candidates: dict[tuple[object, ...], Candidate]
    left_out: str = ""

    def reasons(self, best: Candidate) -> list[str]:
        """Per knob, a line with the cost of its next best value, all else equal."""
        lines = []
        for i, knob in enumerate(KNOBS):
            along = knob in ("context_attention", "context_states")
            if along and (best.knobs[KNOBS.index("context")] == 1 or best.knobs[i] == "auto"):
                continue
            is_routed = knob in ("expert", "route", "copies")
            if is_routed and (
                best.job.model.experts is None or (knob != "expert" and best.job.axes.expert == 1)
            ):
                continue
            if knob == "copies" and best.job.imbalance == 1:
                continue
            others_free = {"context": 2, "expert": 2}.get(knob, 0)  # another degree may have other ways
            free = range(i, i + 1 + others_free)
            others = [c for key, c in self.candidates.items() if _differs_only(key, best.knobs, free)]
            fitting = sorted((c for c in others if not c.short_by), key=lambda c: c.step_time_s)
            if fitting:
                slower = 100 * (fitting[0].step_time_s / best.step_time_s - 1)
                effect = f"{fitting[0].knobs[i]} would be {abs(slower):.1f} % "
                effect += "slower" if slower >= 0 else "faster, which is within the model's error"
            elif others:
                least = min(others, key=lambda c: c.short_by)
                effect = f"{least.knobs[i]} does not fit: {least.short_by / GIB:.3g} GiB short"
            else:
                effect = "no other value was possible here"
            lines.append(f"{SHORT_ALL.get(knob, knob)} {best.knobs[i]}: {effect}")
        return lines


def _differs_only(a: tuple[object, ...], b: tuple[object, ...], free: Sequence[int]) -> bool:
    """Whether two differ in the first of some choices, and else at most in the others of them."""
    end = free[-1] + 1
    return a[free[0]] != b[free[0]] and a[: free[0]] == b[: free[0]] and a[end:] == b[end:]


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
) -> Plan:
    """Every candidate, predicted. Raises UserError if none is possible, or none fits.

    axes:          to try, in each schedule that the search has; None: all of `axes_to_try`
    micro_batches: to try; None: every one that is possible
    exact:         whether all wires are native
    ways:          in which ranks along context attend; those that cannot be are left out
    states:        how those of linear layers travel, as `in_ways` has it
    imbalance:     of experts, as Workload has it
    """
    found: dict[tuple[object, ...], Candidate] = {}
    room = np.inf if machine.device.memory_gib is None else machine.device.memory_gib * GIB
    shorts: dict[tuple[object, ...], Num] = {}
    check_ways(machine, ways)
    axes = axes or axes_to_try(machine)
    possible = _possible(machine, model, ranks, axes, seq_len, ways, states)
    tried = machine, stack, model, ranks, seq_len, global_batch, possible, micro_batches, recompute, exact
    for job in jobs(*tried, imbalance=imbalance):
        placed = _knobs(job, MEMORY_KNOBS)  # wires are left out: they take no memory
        if placed not in shorts:
            peak = peak_bytes(memory_items(job), job.keeps_grads)
            shorts[placed] = np.maximum(0.0, peak - room)
        short = shorts[placed]
        time = step_time(job).total if np.any(short == 0) else np.inf
        for b, a, t, s in np.broadcast(job.micro_batch, job.accumulation, time, short):
            knobs = _knobs(job, KNOBS, int(b))
            found[knobs] = Candidate(knobs, job, int(b), int(a), float(t), float(s))
    if not found:
        given = f" x micro-batch {' or '.join(map(str, micro_batches))}" if micro_batches else ""
        raise UserError(
            f"a global batch of {global_batch} sequences is not divisible by any data-parallel degree of "
            f"{ranks} ranks{given}",
            allowed=f"a multiple of the data-parallel ranks{given}",
        )
    ranked = sorted((c for c in found.values() if not c.short_by), key=lambda c: c.step_time_s)
    if not ranked:
        raise _cannot_fit(machine, model, min(found.values(), key=lambda c: c.short_by))
    return Plan(ranked, found, left_out(model, possible))


def axes_to_try(
    machine: Machine,
    tensor: Sequence[int] | None = None,
    pipeline: Sequence[int] | None = None,
    layers: Sequence[int] = (),
    context: Sequence[int] = (1,),
    expert: Sequence[int] = (1,),
    routes: Sequence[Route] = get_args(Route),
    copies: Sequence[int] = (0,),
) -> list[Ways]:
    """All of these degrees with each other. None: powers of two, to a node's size and to 16 stages

    layers: blocks of each stage, equally many stages on each rank; none: equally many blocks
    """
    dividing = [count for count in _divisors(len(layers)) if count > 1] or [1]
    stages = pipeline or (dividing if layers else _powers(MOST_STAGES))
    return [
        Ways.of_options(tp, pp, max(len(layers) // pp, 1), layers=layers, cp=cp, ep=ep, route=route, copies=n)
        for tp, pp, cp, (ep, route, n) in itertools.product(
            tensor or _powers(machine.node_size), stages, context, to_experts(expert, routes, copies)
        )
    ]


def _possible(
    machine: Machine,
    model: ModelSpec,
    ranks: int,
    axes: Sequence[Ways],
    seq_len: int,
    ways: Sequence[str],
    states: Sequence[States],
) -> list[Ways]:
    """Those of the axes that are possible, in each of the ways along context that are.

    Raises UserError if none is, with the reason of the first.
    """
    possible, refused = list[Ways](), list[UserError]()
    tried = list[Ways]()
    for one in axes:
        try:
            tried += in_ways(machine, model, ranks, one, ways, states)
        except UserError as error:
            refused.append(error)
    for one in tried:
        try:
            mesh_of(machine, model, ranks, one)
            check_layout(layout_of(machine.sizes, one, ranks), one, model, seq_len)
            if not any(_in_orders(model, one)):
                raise UserError(
                    f"no schedule has first and last stage of {model.layers} layers on one of "
                    f"{one.pipeline} ranks, and for a head that is the embedding no other is predicted",
                    where=f"model '{model.name}'",
                )
            possible.append(one)
        except UserError as error:
            refused.append(error)
    if possible:
        return possible
    first, are_alike = refused[0], len({str(error) for error in refused}) == 1
    more = "" if are_alike else "; no other axes are possible either"
    raise UserError(first.what + more, where=first.where, allowed=first.allowed)


def _cannot_fit(machine: Machine, model: ModelSpec, least: Candidate) -> UserError:
    items = memory_items(least.job)
    largest = sorted(items.items(), key=lambda item: -float(item[1]))[:3]
    parts = ", ".join(f"{kind} {float(size) / GIB:.3g} GiB" for kind, size in largest)
    have = f"{least.job.ranks} x {machine.device.memory_gib:g} GiB"
    return UserError(
        f"'{model.name}' does not fit {have}: even the smallest scheme is {least.short_by / GIB:.3g} GiB "
        f"short per rank ({parts})"
    )


def _knobs(job: Workload, names: Sequence[str], micro_batch: int = 0) -> tuple[object, ...]:
    values = vars(job.scheme) | vars(job) | vars(job.axes) | {"micro_batch": micro_batch}
    return tuple(values[name] for name in names)


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
    imbalance: float = 1.0,
) -> Iterator[Workload]:
    """The search's jobs; each has its micro-batches as an array. Raises UserError for impossible axes."""
    for one in axes:
        share, rest = divmod(global_batch, one.with_context(ranks)["data"])
        if rest:
            continue
        # As floats: a step of a trillion parameters has more FLOPs than 64 bits can count.
        batches = np.array([b for b in micro_batches or _divisors(share) if share % b == 0], dtype=float)
        for way in _in_orders(model, one):
            several = batches[batches < share] if way.schedule == "breadth-first" else batches
            if not several.size:
                continue
            base = Workload(
                machine, stack, model, Scheme(name="ddp", weights="self", grads="self", optim="self"), ranks,
                micro_batch=several, seq_len=seq_len, accumulation=share // several, axes=way,
                imbalance=imbalance,
            )  # fmt: skip
            for scheme in schemes(base.levels, exact):
                for each in recompute:
                    yield replace(base, scheme=scheme, recompute=each)


def _in_orders(model: ModelSpec, axes: Ways) -> Iterator[Ways]:
    """These degrees in every schedule of the search."""
    for schedule in get_args(Schedule):
        for chunks in [axes.chunks] if axes.layers else _powers(MOST_CHUNKS):
            way = axes.model_copy(update={"schedule": schedule, "chunks": chunks})
            row = SCHEDULES[way.row]
            if axes.pipeline == 1 and (schedule not in ("1f1b", "breadth-first") or chunks > 1):
                continue
            if chunks < row.chunks[0] or (row.chunks[1] is not None and chunks > row.chunks[1]):
                continue
            is_divided = bool(axes.layers) or model.layers % way.stages == 0
            if is_divided and not (model.tied_head and not way.has_both_ends):
                yield way


_ORDERS = "without zigzag, which is never faster", "with zigzag, which linear layers cannot have"


def left_out(model: ModelSpec, axes: Sequence[Ways]) -> str:
    """What a search over these axes does not try, and why, in one line."""
    found = ["ranks along context, but those of --cp"]
    if any(one.context > 1 for one in axes):
        found = [f"ranks along context {_ORDERS[model.linear_layers > 0]}"]
    if model.experts is not None and all(one.expert == 1 for one in axes):
        found.append("ranks that divide experts, but those of --ep")
    if model.tied_head and any(one.pipeline > 1 for one in axes):
        found.append("schedules whose first and last stage are on two ranks, which share the embedding")
    return "not tried: " + "; ".join(found)


@cache  # the same for every placement
def _divisors(number: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(number) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]


def schemes(levels: Levels, exact: bool = False) -> Iterator[Scheme]:
    """Every placement and its wires. Levels with no more ranks than the level inside them are left out.

    exact: whether all wires are native
    """
    names = ["self", *(name for name in levels.names[1:] if _adds_ranks(levels, name))]
    for weights, grads, optim in itertools.combinations_with_replacement(names, 3):
        for secondary in (None, *names[: names.index(weights)]):
            placed = Scheme(name="plan", weights=weights, secondary=secondary, grads=grads, optim=optim)
            used = {t.collective.name for t in transfers(levels.world, False, placed, levels, "bf16", "bf16")}
            choices = [wires if name in used and not exact else wires[:1] for name, wires in WIRES.items()]
            for wires in itertools.product(*choices):
                update = dict(zip(WIRES, wires, strict=True))
                yield placed.model_copy(update=update)


def _adds_ranks(levels: Levels, name: str) -> bool:
    i = levels.index(name)
    return levels.sizes[i] > levels.sizes[i - 1]
