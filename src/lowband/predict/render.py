"""A prediction as a record for JSON and CSV, and as text that lets a reader check every term."""

from typing import Any

from lowband.cost.bytes import stage_numels, transfers
from lowband.predict.footprint import GIB
from lowband.predict.prediction import Prediction
from lowband.predict.workload import Workload


def record(job: Workload, prediction: Prediction) -> dict[str, Any]:
    """The prediction as plain numbers. Times in seconds, memory in bytes per rank; zero items are kept."""
    p = prediction
    return {
        "provenance": "predicted",
        "cluster": job.machine.name,
        "stack": job.stack.name,
        "model": job.model.name,
        "parameters": job.model.parameters,
        "scheme": job.scheme.name,
        "gpus": job.ranks,
        "tp": job.tp,
        "pp": job.pp,
        "dp": job.dp,
        "interleave": job.interleave,
        "schedule": job.schedule,
        "micro_batch": job.micro_batch,
        "accumulation": job.accumulation,
        "seq_len": job.seq_len,
        "recompute": job.recompute,
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
        "interval": {
            "step_time_s": [float(p.step_time_fast_s), float(p.step_time_slow_s)],
            "tflops_per_gpu": [
                float(p.tflops_per_gpu * p.step_time_s / t) for t in (p.step_time_slow_s, p.step_time_fast_s)
            ],
        },
        **_sync(job),
    }


def _sync(job: Workload) -> dict[str, Any]:
    """Of replicas that meet seldom: bytes that a rank sends in one exchange; nothing of other schemes."""
    scheme, levels = job.scheme, job.levels
    if scheme.sync is None:
        return {}
    numels = stage_numels(job.model, levels, job.tp, job.pp)
    parts = (
        part for i, n in enumerate(numels) for part in transfers(n, i == 0, scheme, levels, "bf16", "bf16")
    )
    sent = sum(part.sent_bytes for part in parts if part.collective.every == "sync")
    replica = levels.size(scheme.sync.beyond)
    return {"sync": {"replica_ranks": replica, "every": scheme.sync.every, "sent_bytes": sent}}


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
        elif isinstance(value, dict):
            columns |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            columns[key] = value
    return columns


def text(row: dict[str, Any]) -> str:
    """One point as text for a terminal."""
    fast, slow = row["interval"]["step_time_s"]
    step = row["step_time_s"]
    lines = [
        f"predicted: {row['model']} under {row['scheme']} on {row['gpus']} ranks of {row['cluster']}, "
        f"stack {row['stack']}",
        f"tp {row['tp']}, pp {row['pp']} x {row['interleave']}, {row['schedule']}, dp {row['dp']}",
        f"micro-batch {row['micro_batch']}, accumulation {row['accumulation']}, sequence {row['seq_len']}, "
        f"recompute {row['recompute']}",
        *([_meeting(row["sync"])] if "sync" in row else []),
        "",
        f"step {step:.4g} s ({fast:.4g} to {slow:.4g}), {row['tokens_per_s_per_gpu']:.4g} tokens/s per rank, "
        f"{row['tflops_per_gpu']:.4g} TFLOPS per rank ({row['hfu_tflops_per_gpu']:.4g} with recomputation)",
        "",
        *_items("seconds", {name: (t, f"{100 * t / step:5.1f} %") for name, t in row["time_s"].items()}),
        "",
        *_items(
            "in the lane, hidden or not, seconds",
            {name: (t, "") for name, t in row["communication_s"].items()},
        ),
        "",
        *_items("GiB per rank", {name: (b / GIB, "") for name, b in row["memory_bytes"].items()}),
        f"  {'held at once':24}{row['peak_memory_bytes'] / GIB:12.4g}  {_fits(row)}",
    ]
    return "\n".join(line.rstrip() for line in lines)


def _meeting(sync: dict[str, int]) -> str:
    return (
        f"replicas of {sync['replica_ranks']} ranks exchange weights every {sync['every']} steps, "
        f"{sync['sent_bytes'] / GIB:.4g} GiB per rank; seconds are the mean over that period"
    )


def _fits(row: dict[str, Any]) -> str:
    if row["fits"] is None:
        return "the device's memory is not known"
    return "fits" if row["fits"] else f"does not fit: {row['short_by_bytes'] / GIB:.3g} GiB short"


def _items(title: str, items: dict[str, tuple[float, str]]) -> list[str]:
    return [title, *(f"  {name:24}{value:12.4g}  {more}" for name, (value, more) in items.items() if value)]
