"""The prediction of a job: time and memory item by item, rates, whether it fits, and an interval."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lowband.cost.flops import hardware_flops_per_token, model_flops_per_token
from lowband.cost.numbers import Num
from lowband.predict.footprint import GIB, memory_items, peak_bytes
from lowband.predict.time import step_time
from lowband.predict.workload import Workload


@dataclass(frozen=True)
class Prediction:
    """The prediction of one job or grid. Times in seconds, memory in bytes per rank, rates per rank.

    time_s:          by the names in predict.time.ITEMS; they add up to step_time_s
    communication_s: time of each collective in the lane, hidden or not
    memory_bytes:    by kind; the kinds peak at different times, `peak_memory_bytes` is their joint peak
    fits:            whether that peak is within the device's memory; None if its size is not known
    step_time_slow_s, step_time_fast_s: with every constant at the slow or fast end of its interval
    """

    step_time_s: Num
    step_time_slow_s: Num
    step_time_fast_s: Num
    time_s: dict[str, Num]
    communication_s: dict[str, Num]
    memory_bytes: dict[str, Num]
    peak_memory_bytes: Num
    fits: Any
    tokens_per_s_per_gpu: Num
    tflops_per_gpu: Num
    hfu_tflops_per_gpu: Num


def predict(job: Workload, interval: bool = True) -> Prediction:
    """Predict `job`. Without `interval`, slow and fast times equal the predicted one: a third of the work."""
    step = step_time(job)
    slow = step_time(job, "slow").total if interval else step.total
    fast = step_time(job, "fast").total if interval else step.total
    items = memory_items(job)
    peak = peak_bytes(items, np.asarray(job.passes) > 1)
    memory_gib = job.machine.device.memory_gib
    tokens = job.tokens / step.total / job.ranks
    model, hardware = _flops_per_token(job)
    return Prediction(
        step_time_s=step.total,
        step_time_slow_s=slow,
        step_time_fast_s=fast,
        time_s=step.items,
        communication_s=step.lane,
        memory_bytes=items,
        peak_memory_bytes=peak,
        fits=None if memory_gib is None else peak <= memory_gib * GIB,
        tokens_per_s_per_gpu=tokens,
        tflops_per_gpu=tokens * model / 1e12,
        hfu_tflops_per_gpu=tokens * hardware / 1e12,
    )


def _flops_per_token(job: Workload) -> tuple[Num, Num]:
    """Model and hardware FLOPs per token; both are linear in the sequence length."""
    at_0, at_1 = (
        np.array([model_flops_per_token(job.model, t), hardware_flops_per_token(job.model, t, job.recompute)])
        for t in (0, 1)
    )
    model, hardware = (a + (b - a) * job.seq_len for a, b in zip(at_0, at_1, strict=True))
    return model, hardware
