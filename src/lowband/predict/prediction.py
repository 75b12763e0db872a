"""The prediction of a job: time and memory item by item, rates, whether it fits, and an interval."""

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from lowband.cost.flops import hardware_flops_per_token, keys_seen, model_flops_per_token
from lowband.cost.numbers import GIB, Num
from lowband.predict.footprint import memory_items, peak_bytes
from lowband.predict.interval import step_interval
from lowband.predict.tiers import held, short_by
from lowband.predict.time import step_time
from lowband.predict.workload import Workload
from lowband.spec.machine import TierName
from lowband.spec.model import ModelSpec
from lowband.spec.step import Recompute


@dataclass(frozen=True)
class Prediction:
    """The prediction of one job or grid. Times in seconds, memory in bytes per rank, rates per rank.

    time_s:          by the names in predict.time.ITEMS; they add up to step_time_s
    communication_s: time of each collective in the lane, hidden or not
    memory_bytes:    by kind; the kinds peak at different times, `peak_memory_bytes` is their joint peak
    tier_bytes:      of a node in each tier beyond the device that is used
    fits:            whether that peak is within the device's memory, and each tier within its own; None if
                     the size of the device's is not known
    step_time_slow_s, step_time_fast_s: ends of the 80 % interval (predict/interval.py)
    """

    step_time_s: Num
    step_time_slow_s: Num
    step_time_fast_s: Num
    time_s: dict[str, Num]
    communication_s: dict[str, Num]
    memory_bytes: dict[str, Num]
    peak_memory_bytes: Num
    tier_bytes: dict[TierName, Num]
    fits: Any
    tokens_per_s_per_gpu: Num
    tflops_per_gpu: Num
    hfu_tflops_per_gpu: Num


@dataclass(frozen=True)
class Speed:
    """Seconds of a step, and rates per rank. tflops: of the model; hfu: with what is recomputed."""

    step_time_s: Num
    tokens_per_s_per_gpu: Num
    tflops_per_gpu: Num
    hfu_tflops_per_gpu: Num


def speed(job: Workload) -> Speed:
    """The speed of `job` without its memory: half of the work of `predict`."""
    return _speed(job, step_time(job).total)


def _speed(job: Workload, step_s: Num) -> Speed:
    tokens = job.tokens / step_s / job.ranks
    model, hardware = _flops_per_token(job)
    return Speed(step_s, tokens, tokens * model / 1e12, tokens * hardware / 1e12)


def predict(job: Workload, interval: bool = True) -> Prediction:
    """Predict `job`. Without `interval`, slow and fast times equal the predicted one."""
    step = step_time(job)
    fast, slow = step_interval(job, step.total) if interval else (step.total, step.total)
    items = memory_items(job)
    peak = peak_bytes(items, job.keeps_grads)
    memory_gib = job.machine.device.memory_gib
    in_tiers = np.asarray(short_by(job, items) == 0)
    fits = None if memory_gib is None else in_tiers & (peak <= memory_gib * GIB)
    return Prediction(
        **vars(_speed(job, step.total)),
        step_time_slow_s=slow,
        step_time_fast_s=fast,
        time_s=step.items,
        communication_s=step.lane,
        memory_bytes=items,
        peak_memory_bytes=peak,
        tier_bytes=held(job, items),
        fits=fits,
    )


def _flops_per_token(job: Workload) -> tuple[Num, Num]:
    """Model and hardware FLOPs per token; both are linear in the keys that a query meets."""
    keys, bare = keys_seen(job.model, job.seq_len), job.model.model_copy(update={"window": None})
    fused = job.stack.attention == "flash" and job.recompute == "selective"  # keeps no scores to recompute
    at_0, at_1 = (_flops_at(bare, length, "none" if fused else job.recompute) for length in (0, 1))
    model, hardware = (a + (b - a) * keys for a, b in zip(at_0, at_1, strict=True))
    again = job.recomputed * (hardware - model)
    if job.lora is not None:  # without gradients of frozen weights, a third of all products with weights
        adapters = 2 * job.model.layers * job.lora.parameters(job.model)
        model, again = model - at_0[0] / 3 + 3 * adapters, again + job.again * adapters
    return model, model + again


@cache
def _flops_at(model: ModelSpec, seq_len: int, recompute: Recompute) -> tuple[float, float]:
    both = model_flops_per_token(model, seq_len), hardware_flops_per_token(model, seq_len, recompute)
    return float(both[0]), float(both[1])
