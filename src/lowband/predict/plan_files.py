"""The output of `lowband plan`: text, and a scheme and suite in config/."""

from pathlib import Path

import yaml

from lowband.errors import UserError
from lowband.predict.footprint import GIB
from lowband.predict.plan import WIRES, Candidate, Plan
from lowband.predict.prediction import predict
from lowband.predict.render import record, text
from lowband.spec.config import Config
from lowband.spec.files import write_whole
from lowband.spec.yaml_model import read_text

SHOWN = 10
STEPS, WARMUP_STEPS = 20, 2  # in the suite it writes


def report(plan: Plan) -> str:
    """The best ten, then the best one item by item, with the cost of each other choice."""
    best = plan.ranked[0]
    lines = [f"{len(plan.candidates)} candidates, {len(plan.ranked)} fit; the fastest:", ""]
    for i, candidate in enumerate(plan.ranked[:SHOWN], start=1):
        lines += [f"{i:2} {_line(candidate)}", f"   {_why(candidate)}"]
    lines += ["", text(record(best.job, predict(best.job))), "", "why, one choice changed at a time:"]
    return "\n".join([*lines, *(f"  {line}" for line in plan.reasons(best))])


def _line(c: Candidate) -> str:
    job, s = c.job, c.job.scheme
    secondary = f"/{s.secondary}" if s.secondary else ""
    wires = ", ".join(f"{w} {s.wire(w)}" for w in WIRES if s.wire(w) != "native") or "all native"
    return (
        f"{c.step_time_s:.4g} s  weights {s.weights}{secondary}, grads {s.grads}, optim {s.optim}; {wires}; "
        f"micro-batch {c.micro_batch} x {c.accumulation}, order {job.order}, "
        f"recompute {job.recompute}, tp {job.tp}, pp {job.pp}"
    )


def _why(c: Candidate) -> str:
    """The candidate's largest costs besides forward and backward computation, and its memory."""
    p = predict(c.job, interval=False)
    costs = {name: float(t) for name, t in p.time_s.items() if name not in ("forward", "backward")}
    largest = sorted(costs.items(), key=lambda item: -item[1])[:3]
    shares = ", ".join(f"{name} {100 * t / c.step_time_s:.1f} %" for name, t in largest if t)
    return f"{shares or 'nothing but products'}; {float(p.peak_memory_bytes) / GIB:.3g} GiB"


def write(best: Candidate, name: str, config: Config) -> tuple[Path, Path]:
    """Add the scheme `name` to config/schemes.yaml and write the suite `name` that runs it.

    Raises UserError if the name is taken, and for features that a suite lacks: tensor and pipeline
    parallelism.
    """
    job = best.job
    if job.tp * job.pp > 1:
        raise UserError(f"tp {job.tp}, pp {job.pp}: the engine runs tp 1, pp 1", allowed="--tp 1 --pp 1")
    schemes = config.schemes_file
    suite = config.suites_folder / f"{name}.yaml"
    if name in config.schemes or suite.exists():
        raise UserError(f"'{name}' is taken", where=schemes)
    keys = ("weights", "secondary", "grads", "optim", *WIRES)
    entry = {key: getattr(job.scheme, key) for key in keys}
    entry = {key: value for key, value in entry.items() if value not in (None, "native")}
    entry["known_as"] = (
        f"found by lowband plan for {job.model.name} on {job.ranks} ranks of {job.machine.name}, "
        f"stack {job.stack.name}, order {job.order}"
    )
    purpose = f"what lowband plan found for {job.model.name} on {job.machine.name}"
    fixed = {
        "model": job.model.name, "scheme": name, "ranks": job.ranks, "micro_batch": best.micro_batch,
        "accumulation": best.accumulation, "order": job.order, "seq_len": job.seq_len,
        "recompute": job.recompute, "steps": STEPS, "warmup_steps": WARMUP_STEPS,
        "compute_dtype": job.compute_dtype, "reduce_dtype": job.reduce_dtype,
    }  # fmt: skip
    before = f"{read_text(schemes).rstrip()}\n\n" if schemes.exists() else ""  # none beside a wheel
    write_whole(schemes, before + _yaml({name: entry}))
    write_whole(suite, _yaml({"purpose": purpose, "cluster": job.machine.name, "fixed": fixed}))
    return schemes, suite


def _yaml(data: object) -> str:
    return yaml.safe_dump(data, sort_keys=False, width=110)
