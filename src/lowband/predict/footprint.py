"""Memory of one rank, item by item: states, gathered units, activations, logits, framework."""

from collections.abc import Mapping
from functools import cache
from math import prod

import numpy as np

from lowband.cost.activations import LOGIT_BYTES, kept_bytes_per_token
from lowband.cost.bytes import stage_numels
from lowband.cost.memory import ADAM_MOMENT_BYTES, MASTER_BYTES, state_bytes
from lowband.cost.numbers import Num
from lowband.predict.workload import Workload
from lowband.spec.mesh import SELF, Levels
from lowband.spec.model import ModelSpec
from lowband.spec.schedule import peak
from lowband.spec.schedules import SCHEDULES, Name
from lowband.spec.scheme import Scheme
from lowband.spec.sourced import Fact
from lowband.spec.wire import DTYPE_BYTES

GIB = 2**30


def memory_items(job: Workload) -> dict[str, Num]:
    """Peak bytes per rank by kind. In addition to the states of `state_bytes`:

        activations  of all blocks for the micro-batches in flight, and of the one block being recomputed
        logits       of the output layer, at the loss
        framework    memory of the machine's runtime itself
        start        beside the shards, while a module is initialised one parameter at a time (cost.memory)

    With a pipeline this is the memory of the first stage, but with the last stage's logits. The first stage
    keeps activations of all micro-batches (breadth-first), or of as many as its schedule has in flight at
    most: p (1F1B, ZB-H1, ZB-V), p + (p - 1) / v (interleaved) ...
    """
    levels, axes = job.levels, job.axes
    numels = stage_numels(job.model, levels, axes)
    once, more = (
        state_bytes(
            numels, job.scheme, levels, job.compute_dtype, job.reduce_dtype, n, "nccl",
            job.collectives or "hops", job.order,
        )
        for n in (1, 2)
    )  # fmt: skip
    items: dict[str, Num] = {
        kind: np.where(np.asarray(job.accumulation) > 1, more[kind], once.get(kind, 0)) for kind in more
    }
    kept = kept_bytes_per_token(
        job.model, job.seq_len, job.recompute, job.attention, axes, job.dropout,
        _value(job.stack.gathered_inputs, 0),
    )  # fmt: skip
    tokens = job.micro_batch * job.seq_len
    most = _most_in_flight(axes.row, axes.pipeline, axes.chunks)
    in_flight = job.accumulation if job.order == "breadth" else np.minimum(job.accumulation, most)
    blocks = job.model.layers // axes.pipeline
    items["activations"] = tokens * (in_flight * blocks * kept.block + kept.working)
    items["logits"] = tokens * _value(job.stack.logit_bytes, LOGIT_BYTES) * job.model.vocab / axes.tensor
    items["start"] = _start_bytes(job.model, job.scheme, levels, job.compute_dtype, axes.tensor, numels)
    items["framework"] = _value(job.machine.device.framework_gib, 0) * GIB
    return items


def _value(fact: Fact | None, otherwise: float) -> float:
    return otherwise if fact is None else fact.value


def peak_bytes(items: Mapping[str, Num], accumulates: Num) -> Num:
    """Bytes at the fullest of three moments: at the start, before there are Adam's moments; at the loss, with
    all activations, and gradients only if they accumulate; after the backward, with all gradients."""
    weights = items["weights"] + items["secondary"] + items["framework"]
    weights = weights + sum(items.get(kind, 0) for kind in ("anchor", "outer", "in_flight"))
    masters = items["optim"] * MASTER_BYTES / (MASTER_BYTES + ADAM_MOMENT_BYTES)
    at_loss = items["activations"] + items["logits"] + np.where(accumulates, items["grads"], 0)
    after = items["grads"] + items["buffers"]
    at_peak = np.maximum(at_loss, after) + items.get("sums", 0)
    in_step = items["optim"] + items["gathered"] + at_peak
    return weights + np.maximum(masters + items["start"], in_step)


@cache
def _most_in_flight(name: Name, ranks: int, chunks: int) -> float:
    """Micro-batches whose activations the first rank holds at most, once they fill the pipeline."""
    return peak([SCHEDULES[name].of_rank(0, ranks, 2 * ranks, chunks)])[0] / chunks


@cache
def _start_bytes(
    model: ModelSpec, scheme: Scheme, levels: Levels, compute_dtype: str, tensor: int, numels: tuple[int, ...]
) -> float:
    """`cost.memory.start_bytes` of the fullest rank, where tensor-parallel ranks hold equal parts."""
    largest = max(prod(shape) for unit in model.unit_shapes() for shape in unit) / tensor
    unit = max(numels) * DTYPE_BYTES[compute_dtype] if levels.hops(SELF, scheme.weights) else 0
    return max(MASTER_BYTES * largest, unit)
