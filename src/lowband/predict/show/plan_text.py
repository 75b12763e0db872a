"""The output of `lowband plan`: text, and rows for JSON and CSV."""

from typing import Any

from lowband.cost.numbers import GIB
from lowband.cost.tiers import Beyond
from lowband.predict.prediction import predict
from lowband.predict.search.candidates import (
    KNOBS,
    MODEL_ERROR,
    RELIEF,
    WIRES,
    Candidate,
    Plan,
    recompute_in_words,
    tiers_in_words,
)
from lowband.predict.search.choice import chosen, lossy_wires
from lowband.predict.search.software import runners
from lowband.predict.show.point_text import fits, text
from lowband.predict.show.record import record
from lowband.predict.workload import Workload
from lowband.spec.axes import SHORT_ALL, shown


def report(plan: Plan) -> str:
    """The best ten placements, then the best one item by item, with the cost of each other choice."""
    rows = chosen(plan)
    best = rows[0]
    lines = [
        f"predicted on {best.batches.machine.name}, stack {best.batches.stack.name}: {plan.tried:,} "
        f"candidates, {len(plan.candidates):,} of them predicted, {len(plan.ranked):,} fit",
        f"the fastest of each placement; lossy wires where they gain more than the model's error, "
        f"{100 * MODEL_ERROR:g} %:",
        "",
    ]
    for i, candidate in enumerate(rows, start=1):
        lines += [f"{i:2} {_line(candidate)}", f"   {_why(candidate)}"]
    lines += ["", text(record(best.job, predict(best.job))), "", "why, one choice changed at a time:"]
    return "\n".join([*lines, *(f"  {line}" for line in plan.reasons(best)), "", plan.left_out])


def records(plan: Plan) -> list[dict[str, Any]]:
    """A row per placement, fastest first: its choices, time, rate and memory. Plain numbers."""
    return [_record(rank, candidate) for rank, candidate in enumerate(chosen(plan), start=1)]


def _record(rank: int, c: Candidate) -> dict[str, Any]:
    row = record(c.job, predict(c.job))
    taken = (
        "provenance", "cluster", "stack", "model", "gpus", "seq_len", "accumulation", "step_time_s",
        "tokens_per_s_per_gpu", "tflops_per_gpu", "peak_memory_bytes", "headroom_bytes", "fits",
    )  # fmt: skip
    fast, slow = row["interval"]["step_time_s"]
    return {
        "rank": rank, **{key: row[key] for key in taken}, "step_time_fast_s": fast, "step_time_slow_s": slow,
        **{
            SHORT_ALL.get(knob, knob): value
            for knob, value in zip(KNOBS, c.knobs, strict=True) if knob not in RELIEF
        },
        **({} if c.job.recomputed == 1 else {"recomputed": c.job.recomputed}),
        **({} if c.job.beyond is None else _tiers_of(c.job.beyond)),
        "order": c.job.order,
        "layers": shown(c.job.axes.layers),
        "runs_in": " ".join(runners(c.job)),
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
        f"recompute {recompute_in_words(job.recompute, job.recomputed)}, {_tiers(job)}"
        f"tp {job.axes.tensor}, {_cp(job)}{_ep(job)}pp {job.axes.pipeline}{_layers(job)}; {_runs_in(job)}"
    )


def _tiers(job: Workload) -> str:
    return f"{tiers_in_words(job.beyond)}, " if job.beyond else ""


def _tiers_of(beyond: Beyond) -> dict[str, Any]:
    """The states beyond the device, and which parts of them, as columns."""
    places = " ".join(f"{state}@{tier}" for state, tier in beyond.places.items())
    return {"tiers": places, **{f"tier_{name}": value for name, value in beyond.parts.items()}}


def _layers(job: Workload) -> str:
    """Blocks of the first stage, the inner ones and the last, where they differ."""
    layers = job.axes.layers
    alike = len(set(layers[1:-1])) <= 1 and len(layers) > 2
    of = f"{layers[0]}, {layers[1]} ..., {layers[-1]}" if alike else ", ".join(map(str, layers))
    return f", layers {of}" if layers else ""


def _runs_in(job: Workload) -> str:
    return f"runs in {', '.join(runners(job)) or 'no software that we know'}"


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
