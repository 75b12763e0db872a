"""Every run of a suite before a node-hour is spent: nodes asked for, memory, step time and its bound."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType

from lowband.cost.bytes import expert_numels, unit_numels
from lowband.cost.checkpoint import CheckpointTime, all_bytes, checkpoint_time, rank_bytes, writers
from lowband.cost.numbers import GIB
from lowband.errors import UserError
from lowband.predict.defaults import with_defaults
from lowband.predict.prediction import Prediction, predict
from lowband.predict.workload import workload_of
from lowband.spec.axes import Axes
from lowband.spec.job import Allocation, SlurmRequest
from lowband.spec.run import RunSpec
from lowband.spec.stack import Stack

PRODUCTS = ("forward", "recompute", "backward")  # of the items of a step: matrix products and attention


@dataclass(frozen=True)
class Rehearsed:
    """One run, without its repeats.

    machine, stack: that were predicted; the stack is our engine's or the peer's
    node_hours: of all repeats, as asked for; nodes, minutes, node_hours are None without a job.yaml, and the
                last two where runs share a job
    steps_hours: predicted node-hours of the steps of all repeats, without start and end
    step_s, fast_s, slow_s: predicted, and the ends of the interval that the constants' sources and the
                defaults for missing ones give
    bound_by:   products, or the largest other item of the step
    checkpoint_gib: all files of one checkpoint; checkpoint_s, resume_s: to write it behind training, and to
                verify and read it; None where the machine file states no rates of storage
    """

    run: str
    machine: str
    stack: str
    repeats: int
    ranks: int
    nodes: int | None
    minutes: int | None
    node_hours: float | None
    steps_hours: float
    step_s: float
    fast_s: float
    slow_s: float
    bound_by: str
    peak_gib: float
    memory_gib: float | None
    fits: bool | None
    checkpoint_gib: float
    checkpoint_s: float | None
    resume_s: float | None


def rehearse(
    specs: Sequence[RunSpec], request: SlurmRequest | None, stacks: Mapping[str, Stack] = MappingProxyType({})
) -> list[Rehearsed]:
    """The runs of a suite, predicted on the suite's own machine; those of peers without a stack are left out.

    stacks: of peers, by engine
    Raises UserError for runs that are not trained on devices: of a box, or counted on fake tensors; and for
    what the cluster's queues refuse.
    """
    for spec in specs:
        if spec.machine.box is not None or spec.device == "fake":
            kind = "counted, not trained" if spec.device == "fake" else "of a box"
            raise UserError(f"the run is {kind}", where=spec.run_id, allowed="suites of a real cluster")
    if not any(spec.engine == "lowband" for spec in specs):
        raise UserError("the suite has no run of our engine", allowed="a suite with engine lowband")
    repeats = Counter(map(_point, specs))
    return [
        _rehearsed(spec, repeats[_point(spec)], request, stacks)
        for spec in specs
        if spec.repeat == 1 and spec.engine in ("lowband", *stacks)
    ]


def _point(spec: RunSpec) -> str:
    return json.dumps(spec.point, sort_keys=True)


def _rehearsed(
    spec: RunSpec, repeats: int, request: SlurmRequest | None, stacks: Mapping[str, Stack]
) -> Rehearsed:
    job = workload_of(spec)
    if spec.engine != "lowband":
        job = replace(job, stack=stacks[spec.engine], collectives=None)
    machine, stack = with_defaults(job.machine, job.stack)
    found = predict(replace(job, machine=machine, stack=stack))
    saved = _checkpoint(spec)
    asked = {} if request is None else request.resources(spec)
    nodes = int(asked["nodes"]) if asked else None
    minutes = int(asked["runtime"]) if request is not None and request.job_of == "run" else None
    hours = repeats * -(-spec.ranks // spec.machine.node_size) / 3600
    return Rehearsed(
        run=spec.run_id.removesuffix("-r1"),
        machine=job.machine.name,
        stack=job.stack.name,
        repeats=repeats,
        ranks=spec.ranks,
        nodes=nodes,
        minutes=minutes,
        node_hours=None if nodes is None or minutes is None else repeats * nodes * minutes / 60,
        steps_hours=hours * spec.steps * float(found.step_time_s),
        step_s=float(found.step_time_s),
        fast_s=float(found.step_time_fast_s),
        slow_s=float(found.step_time_slow_s),
        bound_by=_bound(found),
        peak_gib=float(found.peak_memory_bytes) / GIB,
        memory_gib=spec.machine.device.memory_gib,
        fits=None if found.fits is None else bool(found.fits),
        checkpoint_gib=all_bytes(spec.model.parameters, spec.scheme, spec.levels) / GIB,
        checkpoint_s=None if saved is None else saved.copy_s + saved.write_s,
        resume_s=None if saved is None else saved.read_s,
    )


def _checkpoint(spec: RunSpec) -> CheckpointTime | None:
    machine, levels = spec.machine, spec.levels
    if machine.storage is None:
        return None
    mine = rank_bytes(sum(unit_numels(spec.model, levels, Axes.of(spec))), spec.scheme, levels)
    writing = writers(spec.scheme, levels) * spec.ranks // levels.world
    if spec.expert > 1:  # a rank has experts of its stage, which are divided among those that have the same
        alike = spec.levels_alike
        experts = sum(expert_numels(spec.model, alike, spec.expert)) // spec.pipeline
        mine += rank_bytes(experts, spec.scheme, alike)
        writing = max(writing, writers(spec.scheme, alike) * spec.ranks // alike.world)
    return checkpoint_time(machine.storage, mine, writing, spec.ranks, machine.node_size)


def _bound(found: Prediction) -> str:
    others = {name: float(t) for name, t in found.time_s.items() if name not in PRODUCTS}
    largest = max(others, key=lambda name: others[name])
    products = sum(float(found.time_s[name]) for name in PRODUCTS)
    return "products" if products >= others[largest] else largest


def text(rows: Sequence[Rehearsed], shared: Sequence[Allocation] = ()) -> str:
    """A table for a terminal, and the totals. shared: the jobs that runs share"""
    width = max(len(row.run) for row in rows)
    lines = [
        f"{'predicted':{width}}  runs  nodes  minutes  node-h  step (s)  interval (s)      bound by"
        "             peak (GiB)"
    ]
    for row in rows:
        fits = {None: "", True: "fits", False: "does not fit"}[row.fits]
        of = "" if row.memory_gib is None else f" of {row.memory_gib:g}"
        lines.append(
            f"{row.run:{width}}  {row.repeats:4}  {_or_dash(row.nodes):>5}  {_or_dash(row.minutes):>7}  "
            f"{_or_dash(row.node_hours, '.1f'):>6}  {row.step_s:8.4g}  "
            f"{f'{row.fast_s:.4g} to {row.slow_s:.4g}':16}  {row.bound_by:20} {row.peak_gib:5.1f}{of}  {fits}"
        )
    steps = sum(row.steps_hours for row in rows)
    asked = [row.node_hours for row in rows if row.node_hours is not None]
    request = f"{sum(asked):.3g} node-hours asked for; " if asked else ""
    too_large = sum(row.fits is False for row in rows)
    fit = "every run fits" if not too_large else f"{too_large} of {len(rows)} do not fit"
    total = f"{request}{steps:.3g} node-hours predicted for the steps alone; {fit}"
    stacks = " and ".join(dict.fromkeys(row.stack for row in rows))
    where = f"predicted for {rows[0].machine}, stack {stacks}"
    return "\n".join([*lines, "", where, *_shared(rows, shared), total, *_checkpoints(rows)])


def _shared(rows: Sequence[Rehearsed], shared: Sequence[Allocation]) -> list[str]:
    """A line for the jobs of each number of nodes."""
    lines = []
    for job in shared:
        mine = [row for row in rows if row.nodes == job.nodes]
        hours = sum(row.steps_hours for row in mine)
        slow = sum(row.steps_hours * row.slow_s / row.step_s for row in mine)
        runs = f"{len(job.runs)} runs follow each other" if job.runs[1:] else "a run goes"
        further = ", and in further ones if it is too short" if job.minutes < job.limits_minutes else ""
        lines.append(
            f"on {job.nodes} node{'s' * (job.nodes > 1)} {runs} in a job of {job.minutes} minutes{further}: "
            f"at most {job.nodes * job.minutes / 60:.3g} node-hours each; the steps take {hours:.3g}, "
            f"at the slow ends {slow:.3g}"
        )
    return lines


def _checkpoints(rows: Sequence[Rehearsed]) -> list[str]:
    writes = [row.checkpoint_s for row in rows if row.checkpoint_s is not None]
    reads = [row.resume_s for row in rows if row.resume_s is not None]
    if not writes:
        return []
    sizes = " or ".join(f"{size:.0f} GiB" for size in sorted({row.checkpoint_gib for row in rows}))
    return [
        f"a checkpoint of {sizes}: {min(writes):.1f} to {max(writes):.1f} s to write, behind training; "
        f"{min(reads):.1f} to {max(reads):.1f} s to verify and read, at the rates in machine.yaml"
    ]


def _or_dash(value: float | None, form: str = "") -> str:
    return "-" if value is None else format(value, form)


def records(rows: Sequence[Rehearsed]) -> list[dict[str, object]]:
    """The rows as plain data, with their provenance."""
    return [{"provenance": "predicted", **asdict(row)} for row in rows]
