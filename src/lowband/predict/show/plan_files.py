"""The output of `lowband plan`: text, rows for JSON and CSV, and files in config/ that can be read back."""

from pathlib import Path
from typing import Any

import yaml

from lowband.errors import UserError
from lowband.predict.footprint import GIB
from lowband.predict.prediction import predict
from lowband.predict.search.choice import MODEL_ERROR, chosen, lossy_wires
from lowband.predict.search.plan import KNOBS, WIRES, Candidate, Plan
from lowband.predict.show.render import fits, record, text
from lowband.predict.workload import Workload
from lowband.spec.axes import SHORT_ALL
from lowband.spec.config import Config
from lowband.spec.files import create_whole
from lowband.spec.suites import Suite, expand

SHOWN = 10
STEPS, WARMUP_STEPS = 20, 2  # in the suite it writes


def report(plan: Plan) -> str:
    """The best ten placements, then the best one item by item, with the cost of each other choice."""
    rows = chosen(plan)
    best = rows[0]
    lines = [
        f"predicted on {best.batches.machine.name}, stack {best.batches.stack.name}: {len(plan.candidates)} "
        f"candidates, {len(plan.ranked)} fit",
        f"the fastest of each placement; lossy wires where they gain more than the model's error, "
        f"{100 * MODEL_ERROR:g} %:",
        "",
    ]
    for i, candidate in enumerate(rows[:SHOWN], start=1):
        lines += [f"{i:2} {_line(candidate)}", f"   {_why(candidate)}"]
    if len(rows) > SHOWN:
        lines.append(f"   and {len(rows) - SHOWN} more: --csv")
    lines += ["", text(record(best.job, predict(best.job))), "", "why, one choice changed at a time:"]
    return "\n".join([*lines, *(f"  {line}" for line in plan.reasons(best)), "", plan.left_out])


def records(plan: Plan) -> list[dict[str, Any]]:
    """A row per placement, fastest first: its choices, time, rate and memory. Plain numbers."""
    return [_record(rank, candidate) for rank, candidate in enumerate(chosen(plan), start=1)]


def _record(rank: int, c: Candidate) -> dict[str, Any]:
    row = record(c.job, predict(c.job))
    shown = (
        "provenance", "cluster", "stack", "model", "gpus", "seq_len", "accumulation", "step_time_s",
        "tokens_per_s_per_gpu", "tflops_per_gpu", "peak_memory_bytes", "headroom_bytes", "fits",
    )  # fmt: skip
    fast, slow = row["interval"]["step_time_s"]
    return {
        "rank": rank, **{key: row[key] for key in shown}, "step_time_fast_s": fast, "step_time_slow_s": slow,
        **{SHORT_ALL.get(knob, knob): value for knob, value in zip(KNOBS, c.knobs, strict=True)},
        "order": c.job.order,
        "lossy_wires": lossy_wires(c),
    }  # fmt: skip


def _line(c: Candidate) -> str:
    job, s = c.job, c.job.scheme
    secondary = f"/{s.secondary}" if s.secondary else ""
    wires = ", ".join(f"{w} {s.wire(w)}" for w in WIRES if s.wire(w) != "native") or "all native"
    order = f"order {job.order}"
    if job.is_in_stages:
        order = f"schedule {job.axes.row}" + (f" x {job.axes.chunks}" if job.axes.chunks > 1 else "")
    return (
        f"{c.step_time_s:.4g} s  weights {s.weights}{secondary}, grads {s.grads}, optim {s.optim}; {wires}; "
        f"micro-batch {c.micro_batch} x {c.accumulation}, {order}, "
        f"recompute {job.recompute}, tp {job.axes.tensor}, {_cp(job)}{_ep(job)}pp {job.axes.pipeline}"
    )


def _cp(job: Workload) -> str:
    return f"cp {job.axes.context} {job.axes.attends}, " if job.axes.context > 1 else ""


def _ep(job: Workload) -> str:
    if job.axes.expert == 1:
        return ""
    copies = f" with copies of {job.axes.copies}" if job.axes.copies else ""
    return f"ep {job.axes.expert} {job.axes.route}{copies}, "


def _why(c: Candidate) -> str:
    """The candidate's interval, its largest costs besides forward and backward computation, its memory."""
    p = predict(c.job)
    row = record(c.job, p)
    costs = {name: float(t) for name, t in p.time_s.items() if name not in ("forward", "backward")}
    largest = sorted(costs.items(), key=lambda item: -item[1])[:3]
    shares = ", ".join(f"{name} {100 * t / c.step_time_s:.1f} %" for name, t in largest if t)
    memory = f"{float(p.peak_memory_bytes) / GIB:.3g} GiB"
    if row["headroom_bytes"] is not None:
        room = row["headroom_bytes"] / GIB
        memory += f" of {row['capacity_bytes'] / GIB:g}, headroom {room:.3g} {fits(row)}"
    between = f"{float(p.step_time_fast_s):.4g} to {float(p.step_time_slow_s):.4g} s"
    return f"{between}; {shares or 'nothing but products'}; {memory}"


def write(best: Candidate, name: str, config: Config) -> list[Path]:
    """Write the scheme and the suite `name` into files of their own, and the model if config/ lacks it.

    Raises UserError, before anything is written, if a name is taken, for what a suite cannot run (models that
    are no plain GPT), and for a machine that is no cluster of config.
    """
    job = best.job
    if job.machine.name not in config.clusters:
        raise UserError(f"no cluster '{job.machine.name}' for a suite", where=config.clusters_folder)
    keys = ("weights", "secondary", "grads", "optim", *WIRES)
    entry = {key: getattr(job.scheme, key) for key in keys}
    entry = {key: value for key, value in entry.items() if value not in (None, "native")}
    ways = _ways(job)
    entry["known_as"] = (
        f"found by lowband plan for {job.model.name} on {job.ranks} ranks of {job.machine.name}, "
        f"stack {job.stack.name}, {', '.join(f'{key} {value}' for key, value in ways.items())}"
    )
    fixed = {
        "model": job.model.name, "scheme": name, "ranks": job.ranks, "micro_batch": best.micro_batch,
        "accumulation": best.accumulation, **ways, "seq_len": job.seq_len,
        "recompute": job.recompute, "steps": STEPS, "warmup_steps": WARMUP_STEPS,
        "compute_dtype": job.compute_dtype, "reduce_dtype": job.stack.reduce_dtype,
    }  # fmt: skip
    purpose = f"what lowband plan found for {job.model.name} on {job.machine.name}"
    suite = {"purpose": purpose, "cluster": job.machine.name, "fixed": fixed}
    files = {config.schemes_folder / f"{name}.yaml": entry, config.suites_folder / f"{name}.yaml": suite}
    if job.model.name not in config.models:
        shape = job.model.model_dump(exclude={"name"}, exclude_defaults=True)
        files = {config.models_folder / f"{job.model.name}.yaml": shape, **files}
    elif config.model(job.model.name) != job.model:
        raise UserError(f"another model is named '{job.model.name}'", where=config.models_file)
    taken = [path for path in files if path.exists()]
    if taken or name in config.schemes:
        raise UserError(f"'{name}' is taken", where=taken[0] if taken else config.schemes_file)
    where = config.suites_folder / f"{name}.yaml"
    list(expand(Suite(name=name, **suite), config.machine(job.machine.name), lambda _: job.model,
                lambda _: job.scheme, where))  # fmt: skip
    for path, data in files.items():
        create_whole(path, _yaml(data))
    return list(files)


def _ways(job: Workload) -> dict[str, Any]:
    """The axes, and the order of micro-batches, as a run's options."""
    axes = job.axes
    inside: dict[str, Any] = {}
    if axes.tensor > 1:
        inside = {"tensor": axes.tensor, "sequence_parallel": axes.sequence_parallel}
    if axes.context > 1:
        inside |= {"context": axes.context, "context_attention": axes.context_attention}
        if job.model.linear_layers:
            inside |= {"context_states": axes.context_states, "zigzag": axes.zigzag}
    if axes.expert > 1:
        inside |= {"expert": axes.expert, "route": axes.route}
        inside |= {"copies": axes.copies} if axes.copies else {}
    if not job.is_in_stages:
        return {**inside, "order": job.order}
    layers = {"layers": list(axes.layers)} if axes.layers else {}
    return {**inside, "pipeline": axes.pipeline, "schedule": axes.row, "chunks": axes.chunks, **layers}


def _yaml(data: object) -> str:
    return yaml.safe_dump(data, sort_keys=False, width=110)
