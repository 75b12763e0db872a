"""The largest models by the place of their states, as rows and as a table."""

from typing import Any

from lowband.cost.numbers import GIB
from lowband.predict.search.largest import Largest
from lowband.predict.workload import Workload
from lowband.spec.columns import aligned


def record(found: Largest) -> dict[str, Any]:
    """One row. parameters: 0 if no model fits; full: what is full, the device or a tier; tier_share and
    tier_stride where parts of the optimizer's states were chosen"""
    row: dict[str, Any] = {
        "provenance": "predicted", "places": " ".join(found.places) or "device", "parameters": 0, "layers": 0,
        "hidden": 0, "step_time_s": None, "tflops_per_gpu": None, "device_gib": None, "host_gib": None,
        "disk_gib": None, "full": None,
    }  # fmt: skip
    job, prediction = found.job, found.prediction
    if job is None or prediction is None:
        return row
    parts = {"share": 0} if job.beyond is None and found.places else job.beyond.parts if job.beyond else {}
    tiers = {tier: float(size) / GIB for tier, size in prediction.tier_bytes.items()}
    device = float(prediction.peak_memory_bytes) / GIB
    shares = {"device": device / (job.machine.device.memory_gib or 1)}
    shares |= {tier: size / job.machine.tier(tier).capacity_gib for tier, size in tiers.items()}
    return row | {
        "parameters": job.model.parameters, "layers": job.model.layers, "hidden": job.model.hidden,
        "step_time_s": float(prediction.step_time_s), "tflops_per_gpu": float(prediction.tflops_per_gpu),
        "device_gib": device, **{f"{tier}_gib": size for tier, size in tiers.items()},
        "full": max(shares, key=lambda place: shares[place]),
        **{f"tier_{name}": value for name, value in parts.items()},
    }  # fmt: skip


def text(job: Workload, rows: list[dict[str, Any]]) -> str:
    """A line for each place; sizes in billions of parameters."""
    title = (
        f"predicted: the largest model of the family of {job.model.name} on {job.ranks} ranks of "
        f"{job.machine.name}, {job.scheme.name}, micro-batch {job.micro_batch} x {job.accumulation}, "
        f"sequence {job.seq_len}, stack {job.stack.name}"
    )
    first = rows[0]["parameters"]
    head = "states", "billions", "times", "layers x width", "step (s)", "TFLOPS a rank", "full"
    cells = [[*head, "share", "stride"]]
    for row in rows:
        if not row["parameters"]:
            cells.append([row["places"], "none fits", *[""] * 7])
            continue
        times = f"{row['parameters'] / first:.3g}" if first else ""
        cells.append(
            [
                row["places"], f"{row['parameters'] / 1e9:.4g}", times, f"{row['layers']} x {row['hidden']}",
                f"{row['step_time_s']:.4g}", f"{row['tflops_per_gpu']:.3g}", row["full"],
                *(f"{row[key]:g}" if key in row else "" for key in ("tier_share", "tier_stride")),
            ]
        )  # fmt: skip
    return "\n".join([title, "", *aligned(cells)])
