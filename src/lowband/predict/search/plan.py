"""The search of `lowband plan`: placement x wires x micro-batch x recomputation x axes x schedule, what fits.

It covers these choices only:

    placements  every order weights <= grads <= optim of the levels, with every secondary inside weights
    wires       native or int8 for the two gathers, native or int4 for the reductions in and out of the grads
                level; a collective that sends nothing, or has one rank, keeps its native wire
    batches     every micro-batch (of those given) that divides a data-parallel group's share of the global
                batch; the rest is accumulation
    recompute   none, op, full (or those given), selective where attention keeps its scores, and host where
                the machine states that tier's rates and a run could keep activations there
    axes        and schedules: degrees.py
    relief      where memory is short: some layers recomputed, the optimizer's states on the host (relief.py)
    parts       of the optimizer's states in a tier, share and stride (parts.py)
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np

from lowband.cost.lora import Lora
from lowband.cost.numbers import GIB
from lowband.cost.tiers import Beyond
from lowband.errors import UserError
from lowband.predict.context_ways import ALL_WAYS, check_ways
from lowband.predict.footprint import memory_items
from lowband.predict.room import DoesNotFit
from lowband.predict.search.bounded import Search
from lowband.predict.search.candidates import MODEL_ERROR, Candidate, Plan
from lowband.predict.search.choice import chosen, fits_surely, order
from lowband.predict.search.degrees import axes_to_try, divisors, left_out, possible
from lowband.predict.search.floors import between
from lowband.predict.search.parts import by_units
from lowband.predict.search.placements import schemes
from lowband.predict.search.relief import kinds, relieved
from lowband.predict.search.software import Software
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.machine import Machine
from lowband.spec.model import ModelSpec
from lowband.spec.scheme import Scheme
from lowband.spec.stack import Stack
from lowband.spec.step import Recompute, States

RECOMPUTE: tuple[Recompute, ...] = get_args(Recompute)
# Of those that some jobs cannot have, what a job needs to be able to, and which can.
NOT_EVERYWHERE: dict[Recompute, tuple[str, str]] = {
    "selective": ("keeps scores that it could recompute", "--attention plain"),
    "host": ("could keep its activations on the host", "--tp 1 --pp 1, a GPT of softmax layers"),
}
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
    chooses: bool = True,
    groups: Sequence[tuple[Machine, Stack]] = (),
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
    chooses:       whether share and stride of the optimizer's states in a tier are chosen (parts.py), which
                   `beyond` then has all there
    groups:        machine and stack with groups of nodes as one more level, as `with_groups` has them, for
                   placements over these
    """
    check_ways(machine, ways)
    if tuple(recompute) == ("host",):
        machine.tier("host")
    places = [(machine, stack), *groups]
    tried = [
        possible(on, model, ranks, axes or axes_to_try(on, model), seq_len, ways, states) for on, _ in places
    ]
    bases = [
        by_units(base, software)
        for (on, by), its in zip(places, tried, strict=True)
        for base in _bases(
            on,
            by,
            model,
            ranks,
            seq_len,
            global_batch,
            its,
            micro_batches,
            recompute,
            imbalance,
            beyond,
            lora,
        )
    ]
    if not bases and {*recompute} <= NOT_EVERYWHERE.keys():
        can, allowed = zip(*(NOT_EVERYWHERE[each] for each in recompute), strict=True)
        what = f"no candidate that divides the batch {' or '.join(can)}"
        raise UserError(what, where="--recompute", allowed="; ".join(allowed))
    if not bases:
        given = f" x micro-batch {' or '.join(map(str, micro_batches))}" if micro_batches else ""
        raise UserError(
            f"a global batch of {global_batch} sequences is not divisible by any data-parallel degree of "
            f"{ranks} ranks{given}",
            allowed=f"a multiple of the data-parallel ranks{given}",
        )
    search, names = Search(exact, tuple(software), within, chooses), [row.name for row in software]
    search.run(_computed(bases, software))
    if _is_short(search):
        search.run(_computed(_relieved(search, recompute), software))
    if not search.fits:
        search.predict_all()
    if not search.found:
        raise UserError(f"{' and '.join(names)} cannot run any candidate", allowed="--software any")
    ranked = _ranked(search)
    if not ranked:
        raise _cannot_fit(machine, model, names, min(search.found.values(), key=lambda c: c.short_by))
    return Plan(ranked, search.found, left_out(model, tried[0], names), search.tried, search.around)


def _computed(bases: Iterable[Workload], software: Sequence[Software]) -> list[Workload]:
    """Those that some of the software computes; all, where it is none."""
    return [base for base in bases if not software or any(row.computes(base) for row in software)]


def _ranked(search: Search) -> list[Candidate]:
    fitting = (c for c in search.found.values() if not c.short_by)
    return sorted(fitting, key=order)


def _is_short(search: Search) -> bool:
    """Whether memory is: nothing fits, or the first row recomputes, or may not fit."""
    if not (ranked := _ranked(search)):
        return search.tried > 0
    first = chosen(Plan(ranked, search.found))[0]
    return first.job.recompute != "none" or not fits_surely(first)


def _relieved(search: Search, recompute: Sequence[Recompute]) -> Iterator[Workload]:
    """Jobs that need less memory, and could be as fast as what is shown."""
    first, fits = min(recompute, key=RECOMPUTE.index), search.fits
    for base in search.near(first):
        yield from relieved(base, recompute, fits)


def _cannot_fit(machine: Machine, model: ModelSpec, names: Sequence[str], least: Candidate) -> DoesNotFit:
    """names: of the software to which the search has kept"""
    items = memory_items(least.job)
    largest = sorted(items.items(), key=lambda item: -float(item[1]))[:3]
    parts = ", ".join(f"{kind} {float(size) / GIB:.3g} GiB" for kind, size in largest)
    have = f"{least.job.ranks} x {machine.device.memory_gib:g} GiB"
    which = f" that {' or '.join(names)} runs" if names else ""
    return DoesNotFit(
        f"'{model.name}' does not fit {have}: even the smallest scheme{which} is {least.short_by / GIB:.3g} "
        f"GiB short per rank ({parts})",
        allowed="--software any, or another --stack" if names else (),
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
    """Jobs in these axes and schedules, under DDP. Of those that differ in schedule and stages alone one is
    checked: the others are as possible."""
    checked = dict[tuple[object, ...], Workload]()
    for way in axes:
        share, rest = divmod(global_batch, way.with_context(ranks)["data"])
        if rest:
            continue
        # As floats: a step of a trillion parameters has more FLOPs than 64 bits can count.
        batches = np.array([b for b in micro_batches or divisors(share) if share % b == 0], dtype=float)
        several = batches[batches < share] if way.schedule == "breadth-first" else batches
        if not several.size:
            continue
        many = share // several
        if (key := between(way)) not in checked:
            checked[key] = Workload(
                machine, stack, model, DDP, ranks, micro_batch=several, seq_len=seq_len, accumulation=many,
                axes=way, imbalance=imbalance, beyond=beyond, lora=lora,
            )  # fmt: skip
        yield from kinds(checked[key].varied(micro_batch=several, accumulation=many, axes=way), recompute)
