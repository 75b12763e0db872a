"""What `lowband plan --write` writes into config/: files that can be read back."""

from pathlib import Path
from typing import Any

import yaml

from lowband.errors import UserError
from lowband.predict.search.candidates import WIRES, Candidate
from lowband.predict.workload import Workload
from lowband.spec.config import Config
from lowband.spec.files import create_whole
from lowband.spec.scheme import Scheme
from lowband.spec.suites import Suite, expand
from lowband.spec.tiers import DEVICE, at

STEPS, WARMUP_STEPS = 20, 2  # in the suite it writes


def write(best: Candidate, name: str, config: Config) -> list[Path]:
    """Write the scheme and the suite `name` into files of their own, and the model if config/ lacks it.

    Raises UserError, before anything is written, if a name is taken, for what a suite cannot run (models that
    are no plain GPT), and for a machine that is no cluster of config.
    """
    job = best.job
    if job.machine.name not in config.clusters:
        raise UserError(f"no cluster '{job.machine.name}' for a suite", where=config.clusters_folder)
    if (job.stack.products, job.stack.optimizer) != ("bf16", "adamw"):
        what = f"products {job.stack.products}, optimizer {job.stack.optimizer}"
        raise UserError(f"{what}: a run has bf16 and adamw", where="--write", allowed="neither option")
    keys = ("weights", "secondary", "grads", "optim", *WIRES)
    entry: dict[str, Any] = {key: getattr(job.scheme, key) for key in keys}
    for key in ("optim", "weights") if job.placed is not None else ():
        entry[key] = at(entry[key], getattr(job.placed, key) or DEVICE)
    if job.beyond is not None:
        entry["offload"] = job.beyond.parts or None
    entry = {key: value for key, value in entry.items() if value not in (None, "native")}
    placed = Scheme(name=name, **entry)
    ways = _ways(job)
    entry["known_as"] = (
        f"found by lowband plan for {job.model.name} on {job.ranks} ranks of {job.machine.name}, "
        f"stack {job.stack.name}, {', '.join(f'{key} {value}' for key, value in ways.items())}"
    )
    some = {"recompute_layers": round(job.recomputed * job.model.layers)} if job.recomputed < 1 else {}
    fixed = {
        "model": job.model.name, "scheme": name, "ranks": job.ranks, "micro_batch": best.micro_batch,
        "accumulation": best.accumulation, **ways, "seq_len": job.seq_len,
        "recompute": job.recompute, **some, "steps": STEPS, "warmup_steps": WARMUP_STEPS,
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
    check_free(name, config)
    where = config.suites_folder / f"{name}.yaml"
    list(expand(Suite(name=name, **suite), config.machine(job.machine.name), lambda _: job.model,
                lambda _: placed, where))  # fmt: skip
    made: list[Path] = []
    try:
        for path, data in files.items():
            if not create_whole(path, _yaml(data)):
                raise UserError(f"'{path.stem}' is taken", where=path)
            made.append(path)
    except (OSError, UserError):  # all of them or none, or the same name would be taken next time
        for path in made:
            path.unlink()
        raise
    return made


def check_free(name: str, config: Config) -> None:
    """Raises UserError for a name that a scheme or a suite has."""
    files = config.schemes_folder / f"{name}.yaml", config.suites_folder / f"{name}.yaml"
    taken = [path for path in files if path.exists()]
    if taken or name in config.schemes:
        raise UserError(f"'{name}' is taken", where=taken[0] if taken else config.schemes_file)


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
