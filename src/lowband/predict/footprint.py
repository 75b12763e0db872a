"""Memory of one rank, item by item: states, gathered units, activations, logits, framework."""

from collections.abc import Mapping

import numpy as np

from lowband.cost.activations import kept_bytes_per_token
from lowband.cost.bytes import stage_numels
from lowband.cost.memory import state_bytes
from lowband.cost.numbers import Num
from lowband.predict.workload import Workload

GIB = 2**30


def memory_items(job: Workload) -> dict[str, Num]:
    """Peak bytes per rank by kind. In addition to the states of `state_bytes`:

        activations  of all blocks for the micro-batches in flight, and of the one block being recomputed
        logits       of the output layer, at the loss
        framework    memory of the machine's runtime itself

    With a pipeline this is the memory of the first stage, but with the last stage's logits. The first stage
    keeps activations of p micro-batches (1F1B), of p + (p - 1) / v (interleaved) or of all (breadth-first).
    """
    levels = job.levels
    numels = stage_numels(job.model, levels, job.tp, job.pp)
    once, more = (
        state_bytes(numels, job.scheme, levels, job.compute_dtype, job.reduce_dtype, passes, "nccl")
        for passes in (1, 2)
    )
    items: dict[str, Num] = {
        kind: np.where(np.asarray(job.accumulation) > 1, more[kind], once[kind]) for kind in once
    }
    kept = kept_bytes_per_token(
        job.model, job.seq_len, job.recompute, job.attention, job.tp, job.sequence_parallel, job.dropout
    )
    tokens = job.micro_batch * job.seq_len
    in_flight = np.minimum(job.accumulation, job.pp * 1.0)
    if job.interleave > 1:
        in_flight = np.minimum(job.accumulation, job.pp + (job.pp - 1) / job.interleave)
    if job.schedule == "breadth-first":
        in_flight = job.accumulation
    blocks = job.model.layers // job.pp
    items["activations"] = tokens * (in_flight * blocks * kept.block + kept.working)
    items["logits"] = tokens * kept.head
    framework = job.machine.device.framework_gib
    items["framework"] = (0.0 if framework is None else framework.value) * GIB
    return items


def peak_bytes(items: Mapping[str, Num], accumulates: Num) -> Num:
    """The larger of two peaks, in bytes: at the loss, with all activations, and with gradients only if they
    accumulate; and after the backward, with all gradients."""
    always = sum(items[kind] for kind in ("weights", "secondary", "optim", "gathered", "framework"))
    at_loss = items["activations"] + items["logits"] + np.where(accumulates, items["grads"], 0)
    after = items["grads"] + items["buffers"]
    return always + np.maximum(at_loss, after)
