"""A prediction as a record for JSON and CSV: plain numbers, every term."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from lowband.cost.bytes import stage_numels, transfers
from lowband.cost.lora import Lora
from lowband.cost.numbers import GIB
from lowband.cost.tiers import Beyond
from lowband.predict.context import context_sent
from lowband.predict.defaults import constants
from lowband.predict.experts import experts_sent
from lowband.predict.prediction import Prediction
from lowband.predict.room import room_of
from lowband.predict.workload import Workload
from lowband.spec.axes import SHORT, shown
from lowband.spec.sourced import Kind
from lowband.spec.tiers import at

SENT = "_sent_bytes"
STATES = ("weights", "secondary", "grads", "optim")
KINDS: tuple[Kind, ...] = ("fitted", "measured or published", "assumed", "default")


def record(job: Workload, prediction: Prediction) -> dict[str, Any]:
    """The prediction as plain numbers. Times in seconds, memory in bytes per rank; zero items are kept."""
    p, room = prediction, room_of(job, prediction)
    axes = vars(job.axes) | job.axes.with_context(job.ranks)
    return {
        "provenance": "predicted",
        "cluster": job.machine.name,
        "stack": job.stack.name,
        "evidence": job.stack.has_evidence,
        "model": job.model.name,
        "parameters": job.model.parameters,
        "scheme": job.scheme.name,
        **{key: getattr(job.scheme, key) for key in STATES},
        "weights": at(job.scheme.weights, job.scheme.weights_tier),
        "optim": at(job.scheme.optim, job.scheme.optim_tier),
        "gpus": job.ranks,
        **{short: axes[name] for name, short in SHORT.items()},
        "schedule": job.axes.schedule,
        **({"layers": shown(job.axes.layers)} if job.axes.layers else {}),
        "micro_batch": job.micro_batch,
        "accumulation": job.accumulation,
        "seq_len": job.seq_len,
        "recompute": job.recompute,
        **({} if job.recomputed == 1 or job.recompute == "none" else {"recomputed": job.recomputed}),
        **({} if job.lora is None else {"lora": _adapters(job, job.lora)}),
        "attention": job.stack.attention,
        "products": job.stack.products,
        "operations": job.stack.operations,
        **({"gated_kept": job.stack.gated_kept} if job.model.gated else {}),
        "optimizer": job.stack.optimizer,
        "dropout": job.stack.dropout,
        "sequence_parallel": job.axes.sequence_parallel,
        "reduce_dtype": job.stack.reduce_dtype,
        "step_time_s": float(p.step_time_s),
        "tflops_per_gpu": float(p.tflops_per_gpu),
        "hfu_tflops_per_gpu": float(p.hfu_tflops_per_gpu),
        "tokens_per_s_per_gpu": float(p.tokens_per_s_per_gpu),
        "time_s": {name: float(value) for name, value in p.time_s.items()},
        "communication_s": {name: float(value) for name, value in p.communication_s.items()},
        "memory_bytes": {name: round(float(value)) for name, value in p.memory_bytes.items()},
        "peak_memory_bytes": round(float(p.peak_memory_bytes)),
        "fits": None if p.fits is None else bool(p.fits),
        "short_by_bytes": round(short_by(job, p)),
        "capacity_bytes": None if room is None else round(room.capacity),
        "runtime_bytes": round(float(p.memory_bytes["framework"])),
        "headroom_bytes": None if room is None else round(room.headroom),
        "interval": {
            "step_time_s": [float(p.step_time_fast_s), float(p.step_time_slow_s)],
            "tflops_per_gpu": [
                float(p.tflops_per_gpu * p.step_time_s / t) for t in (p.step_time_slow_s, p.step_time_fast_s)
            ],
            "headroom_bytes": None if room is None else [round(room.low), round(room.high)],
        },
        "constants": {
            path: {
                **fact.model_dump(include={"value", "low", "high", "source"}),
                "kind": fact.kind,
                **({"fitted_on": fact.fitted_on} if fact.fitted_on else {}),
            }
            for path, fact in constants(job.machine, job.stack).items()
        },
        **_context(job),
        **_experts(job),
        **_sync(job),
        **_tiers(job, prediction),
    }


def _adapters(job: Workload, lora: Lora) -> dict[str, Any]:
    trained = job.model.layers * lora.parameters(job.model)
    return {"rank": lora.rank, "on": " ".join(lora.on), "parameters": trained}


def _tiers(job: Workload, prediction: Prediction) -> dict[str, Any]:
    """Of what lies beyond the device: which, and a node's bytes in each tier; nothing if all is on it."""
    if not job.tiers:
        return {}
    tiers = {
        f"{tier}_{name}_bytes": round(float(size))
        for tier, held in prediction.tier_bytes.items()
        for name, size in (("node", held), ("capacity", job.machine.tier(tier).capacity_gib * GIB))
    }
    kept = {"activations": "host"} if job.recompute == "host" else {}
    placed = job.placed or Beyond()
    given = job.scheme.offload or placed.offload or placed
    late = {"late": True} if job.is_late else {}
    places = {"optim": placed.optim, "weights": placed.weights}
    return {"tiers": places | {"share": given.share, "stride": given.stride} | late | kept | tiers}


def _context(job: Workload) -> dict[str, Any]:
    """Of ranks along context: how many, how they attend, and what each sends there in a step, in the mean, by
    level; nothing on one."""
    if job.axes.context == 1:
        return {}
    of = {"cp": job.axes.context, "ways": job.axes.attends, "zigzag": job.axes.zigzag}
    return {"context": of | _by_level(context_sent(job))}


def _experts(job: Workload) -> dict[str, Any]:
    """Of ranks that divide experts: how many, how tokens travel, and what each sends to and fro in a step, in
    the mean, by level; nothing on one."""
    if job.axes.expert == 1:
        return {}
    of = {"ep": job.axes.expert, "route": job.axes.route, "imbalance": min(job.imbalance, job.axes.expert)}
    if job.axes.copies:
        of |= {"copies": job.axes.copies, "load": job.load}
    return {"experts": of | _by_level(experts_sent(job))}


def _by_level(found: Mapping[tuple[str, str, str], float]) -> dict[str, float]:
    sent: defaultdict[str, float] = defaultdict(float)
    for (level, _, _), count in found.items():
        sent[level] += count
    return {f"{level}{SENT}": count for level, count in sent.items()}


def _sync(job: Workload) -> dict[str, Any]:
    """Of replicas that meet seldom: what a rank sends in one period, and of it in the exchange of the largest
    fragment; nothing of other schemes."""
    scheme, levels = job.scheme, job.levels
    if (sync := scheme.sync) is None:
        return {}
    by_fragment = [0] * sync.fragments
    for i, numel in enumerate(stage_numels(job.model, levels, job.axes)):
        parts = transfers(numel, i == 0, scheme, levels, "bf16", "bf16")
        sent = sum(part.sent_bytes for part in parts if part.collective.every == "sync")
        by_fragment[sync.fragment_of(i)] += sent
    return {
        "sync": {
            "replica_ranks": levels.size(sync.beyond),
            "every": sync.every,
            "fragments": sync.fragments,
            "delay": sync.delay,
            "sent_bytes": sum(by_fragment),
            "most_at_once_bytes": max(by_fragment),
        }
    }


def short_by(job: Workload, prediction: Prediction) -> float:
    """Bytes by which the device's memory is too small; 0 if it suffices."""
    memory_gib = job.machine.device.memory_gib
    return 0.0 if memory_gib is None else max(0.0, float(prediction.peak_memory_bytes) - memory_gib * GIB)


def flat(row: dict[str, Any]) -> dict[str, Any]:
    """The record with each item in its own column, for a table."""
    columns: dict[str, Any] = {}
    for key, value in row.items():
        if key == "interval":
            columns["step_time_fast_s"], columns["step_time_slow_s"] = value["step_time_s"]
            room = value["headroom_bytes"] or (None, None)
            columns["headroom_low_bytes"], columns["headroom_high_bytes"] = room
        elif key == "constants":
            columns |= {f"constants.{kind}": " ".join(names_of(value, kind)) for kind in KINDS}
        elif isinstance(value, dict):
            columns |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            columns[key] = value
    return columns


def names_of(found: dict[str, Any], kind: Kind) -> list[str]:
    """Of a record's constants the names of a kind."""
    return [path for path, one in found.items() if one["kind"] == kind]
