"""Memory of one rank, item by item: states, gathered units, activations, logits, framework."""

from collections.abc import Mapping
from functools import cache, lru_cache
from math import prod

import numpy as np

from lowband.cost import linear
from lowband.cost.activations import HALF, LOGIT_BYTES, Kept, kept_bytes_per_token, loss_bytes
from lowband.cost.bytes import experts_apart
from lowband.cost.context_load import held_more, kept_more
from lowband.cost.experts import copied_bytes
from lowband.cost.lora import of_frozen
from lowband.cost.memory import (
    MASTER_BYTES,
    MOMENT_BYTES,
    STATE_BYTES,
    are_gathered,
    state_bytes,
    together,
)
from lowband.cost.numbers import GIB, Num, stacked
from lowband.predict.place import Place, alike, fullest, gathered_block, reused
from lowband.predict.tiers import moved
from lowband.predict.workload import Workload
from lowband.spec.activations import KEPT_KIND
from lowband.spec.model import ModelSpec
from lowband.spec.schedule import owed, peak
from lowband.spec.schedules import SCHEDULES, Name
from lowband.spec.scheme import Scheme
from lowband.spec.sourced import Fact
from lowband.spec.step import Recompute
from lowband.spec.tiers import Tier, at
from lowband.spec.wire import DTYPE_BYTES

FILLED = 2  # micro-batches for each rank along pipeline with which it holds as much as with any more


def memory_items(job: Workload) -> dict[str, Num]:
    """Peak bytes per rank by kind. In addition to the states of `state_bytes`:

        activations  of all blocks for the micro-batches in flight, and of the one block being recomputed
        copies       of experts, and a rank's own beside them, of all layers or of the one being recomputed
        logits       of the output layer, at the loss
        context      along context alone: what attention of the block in backward holds (cost.context_load)
        linear       of linear layers: what attention of the block in backward holds (cost.linear)
        framework    memory of the machine's runtime itself
        start        beside the shards, while a module is initialised one parameter at a time (cost.memory)
        ..@<tier>    of states beyond the device (tiers.py), and of activations that wait there

    With a pipeline this is the memory of the first stage, but with the last stage's logits. The first stage
    keeps activations of all micro-batches (breadth-first), or of as many as its schedule has in flight at
    most: p (1F1B, ZB-H1, ZB-V), p + (p - 1) / v (interleaved) ... Where backwards are split and a block is
    recomputed, it has its activations from the input part to the weight part: of the rank that has most.
    """
    if not job.axes.is_uneven:
        place = alike(job)
        return items_at(job, place, of_passes(job, place, kept(job)))
    shape, points = job.points()
    return stacked(shape, [_fullest(one) for one in points])


def _fullest(job: Workload) -> dict[str, Num]:
    """Of uneven stages, those of the place that needs most. job: one point"""
    here = kept(job)
    of_places = (items_at(job, place, of_passes(job, place, here)) for place in fullest(job))
    return max(of_places, key=lambda items: float(peak_bytes(items, job.keeps_grads)))


def items_at(job: Workload, place: Place, of_passes: Mapping[str, Num]) -> dict[str, Num]:
    """Those of a place. of_passes: what its forwards and backwards hold"""
    several = job.sums_grads
    more = _states(job, place, 2)
    once = more if several.all() else _states(job, place, 1)
    items: dict[str, Num] = {kind: np.where(several, more[kind], once.get(kind, 0)) for kind in more}
    moments = MOMENT_BYTES[job.stack.optimizer]
    items["optim"] = items["optim"] * ((MASTER_BYTES + moments) / STATE_BYTES)
    items |= of_passes
    items["start"] = _start_bytes(job, place)
    items["framework"] = _value(job.machine.device.framework_gib, 0) * GIB
    return moved(job, place, items)


def of_passes(job: Workload, place: Place, here: Kept) -> dict[str, Num]:
    """What forwards and backwards hold, wherever states lie. here: of activations, as `kept` has it"""
    items, axes = dict[str, Num](), job.axes
    tokens = job.micro_batch * job.own_tokens
    items["activations"] = (
        _apart(place, tokens, here) if place.held else held_alike(job, place.blocks, tokens, here)
    )
    if job.recompute == "host":
        in_flight = job.accumulation if job.order == "breadth" else 1
        items[KEPT_KIND] = tokens * in_flight * place.blocks * here.host
    if axes.copies:
        of_layer = copied_bytes(job.model, job.levels_of_experts, axes.route, job.compute_dtype, axes.copies)
        items["copies"] = of_layer * (1 if job.recompute == "full" else place.blocks)
    logit = _value(job.stack.logit_bytes, LOGIT_BYTES)
    items["logits"] = place.heads * loss_bytes(job.model, tokens, job.loss_chunks, logit) / axes.tensor
    if axes.context > 1 and job.model.linear_layers < job.model.layers:
        items["context"] = tokens * held_more(job.model, axes.tensor, job.layout, job.compute_dtype)
    if job.model.linear_layers:
        own = job.model, axes.tensor, job.own_tokens, job.compute_dtype
        items["linear"] = tokens * linear.held_bytes(*own)
    return items


def kept(job: Workload) -> Kept:
    """Bytes of activations per token: of the mean layer, where some are recomputed and others are not.

    Breadth-first the graph is cut behind each block, whose output then stays on the device.
    """
    return in_mean(job, kept_with(job, job.recompute), kept_with(job, "none"))


def kept_with(job: Workload, recompute: Recompute) -> Kept:
    """The same of a layer, with a kind of recomputation."""
    return kept_bytes_per_token(
        job.model, job.seq_len, recompute, job.stack.attention, job.axes, job.stack.dropout,
        _value(job.stack.gathered_inputs, 0), _kept_more(job), job.load, job.stack.gated_kept,
        job.levels_of_experts, job.lora,
    )  # fmt: skip


def in_mean(job: Workload, found: Kept, whole: Kept) -> Kept:
    """Of the mean layer. found: of one with the job's recomputation; whole: without"""
    share = job.recomputed
    cut = HALF * job.model.hidden if job.recompute == "host" and job.order == "breadth" else 0.0
    block = share * (found.block + cut) + (1 - share) * whole.block
    return Kept(block, found.working * (share > 0), share * found.host)


# A search asks for the same shards with each micro-batch and each way to recompute.
_of_shards = lru_cache(maxsize=4096)(state_bytes)


def _states(job: Workload, place: Place, accumulation: int) -> dict[str, int]:
    """Bytes of each state. Of weights beyond the device, what is gathered, and buffers, as if the scheme
    placed them there; the rest is `moved`."""
    if job.lora is not None:
        return _states_of_adapted(job, place, accumulation)
    found = _states_under(job.scheme, job, place, accumulation)
    if (scheme := _gathered_scheme(job)) is not job.scheme:
        there = _states_under(scheme, job, place, accumulation)
        found |= {kind: there[kind] for kind in there if kind == "gathered" or kind.startswith("buffers")}
    if stay := reused(job, place):
        held = DTYPE_BYTES[job.compute_dtype] * (place.numels[0] + stay * gathered_block(job, place))
        found["gathered"] = max(found["gathered"], held)
    return found


def _gathered_scheme(job: Workload) -> Scheme:
    """The scheme, with weights in the tier from which they are gathered."""
    tier = None if job.placed is None else job.placed.weights
    return job.scheme if tier in (None, job.scheme.weights_tier) else _with_weights(job.scheme, tier)


@cache
def _with_weights(scheme: Scheme, tier: Tier) -> Scheme:
    return Scheme.model_validate(scheme.model_dump() | {"weights": at(scheme.weights, tier)})


def _states_under(scheme: Scheme, job: Workload, place: Place, accumulation: int) -> dict[str, int]:
    """Bytes of each state, of experts that ranks divide, too."""
    of_both = [
        _of_shards(
            numels, scheme, levels, job.compute_dtype, job.stack.reduce_dtype, accumulation, "nccl",
            job.collectives or "hops", "breadth" if job.is_in_stages else job.order, job.fused_adamw,
            job.stack.summed_bytes,
        )
        for numels, levels in ((place.numels, job.levels), (place.expert_numels, job.levels_alike))
        if numels
    ]  # fmt: skip
    found = together(of_both)
    return _of_stages(job, place, found, accumulation) if job.is_in_stages else found


def _states_of_adapted(job: Workload, place: Place, accumulation: int) -> dict[str, int]:
    """Of adapters all states; of what is frozen the weights alone, in the compute dtype."""
    trained, frozen = (
        state_bytes(
            numels, scheme, job.levels, job.compute_dtype, job.stack.reduce_dtype, accumulation, "nccl",
            job.collectives or "hops", job.order, job.fused_adamw, job.stack.summed_bytes,
        )
        for numels, scheme in ((job.adapters, job.scheme), (place.numels, of_frozen(job.scheme)))
    )  # fmt: skip
    held = DTYPE_BYTES[job.compute_dtype] * sum(place.numels) // job.levels.size(job.scheme.weights)
    more = {"weights": held, "secondary": frozen["secondary"], "gathered": frozen["gathered"]}
    return {kind: size + more.get(kind, 0) for kind, size in trained.items()}


def _kept_more(job: Workload) -> Num:
    """Bytes per token that attention keeps beside what `kept_bytes_per_token` counts, in the mean block."""
    more = kept_more(job.model, job.axes.tensor, job.layout, job.compute_dtype)
    if not job.model.linear_layers:
        return more
    share = job.model.linear_layers / job.model.layers
    of_linear = linear.kept_bytes(job.model, job.axes.tensor, job.own_tokens, job.compute_dtype)
    return (1 - share) * more + share * of_linear


def _value(fact: Fact | None, otherwise: float) -> float:
    return otherwise if fact is None else fact.value


def peak_bytes(items: Mapping[str, Num], accumulates: Num) -> Num:
    """Bytes at the fullest of three moments: at the start, before there are Adam's moments; at the loss, or
    along context and of linear layers in the block behind it, with all activations, and gradients only if
    they accumulate; after the backward, with all gradients."""
    weights = items["weights"] + items["secondary"] + items["framework"]
    weights = weights + sum(items.get(kind, 0) for kind in ("anchor", "outer", "in_flight"))
    masters = items["optim"] * MASTER_BYTES / STATE_BYTES
    last = np.maximum(items["logits"], np.maximum(items.get("context", 0), items.get("linear", 0)))
    at_loss = items["activations"] + items.get("copies", 0) + last + np.where(accumulates, items["grads"], 0)
    after = items["grads"] + items["buffers"]
    at_peak = np.maximum(at_loss, after) + items.get("sums", 0)
    in_step = items["optim"] + items["gathered"] + at_peak
    return weights + np.maximum(masters + items["start"], in_step)


def _of_stages(job: Workload, place: Place, items: Mapping[str, int], accumulation: int) -> dict[str, int]:
    """The states of a pipeline's rank, where those of a stage's units are together (cost/stages.py): gathered
    with the next stage's first unit, and summed over micro-batches until the stage's last backward."""
    found = {kind: size for kind, size in items.items() if kind != "sums"}
    if items["gathered"]:
        all_are = are_gathered(_gathered_scheme(job), job.levels_alike)
        elements = place.gathered if all_are else place.gathered_beside
        found["gathered"] = DTYPE_BYTES[job.compute_dtype] * elements
    if accumulation > 1:
        found["grads"] = max(items["grads"], job.stack.summed_bytes * place.summed)
    return found


def held_alike(job: Workload, blocks: int, tokens: Num, kept: Kept) -> Num:
    """Bytes of activations at the most where all stages have equally many blocks.

    blocks: of a rank; tokens: of a micro-batch
    """
    axes = job.axes
    if SCHEDULES[axes.row].splits and job.recompute != "none":
        in_blocks: Num = 0.0
        for held, late in most_held(axes.row, axes.pipeline, axes.chunks):
            of_rank = np.minimum(job.accumulation, held) * kept.block
            waiting = np.minimum(job.accumulation, late) * job.recomputed
            in_blocks = np.maximum(in_blocks, of_rank + waiting * kept.working)
        return tokens * blocks * in_blocks
    most, _ = most_held(axes.row, axes.pipeline, axes.chunks)[0]
    in_flight = job.accumulation if job.order == "breadth" else np.minimum(job.accumulation, most)
    return tokens * (in_flight * blocks * kept.block + kept.working)


def _apart(place: Place, tokens: Num, kept: Kept) -> Num:
    """The same at a place in a pipeline of uneven stages."""
    most: Num = 0.0
    for held, again in place.held:
        most = np.maximum(most, held * kept.block + again * kept.working)
    return tokens * most


@cache
def most_held(name: Name, ranks: int, chunks: int, many: int | None = None) -> list[tuple[float, float]]:
    """By rank, the micro-batches whose activations it holds at most, and those whose weight parts wait.

    many: of a step; None: as many as fill the pipeline
    """
    count = FILLED * ranks if many is None else many
    lists = [SCHEDULES[name].of_rank(rank, ranks, count, chunks) for rank in range(ranks)]
    late = owed(lists) if SCHEDULES[name].splits else [0] * ranks
    return [(held / chunks, waiting / chunks) for held, waiting in zip(peak(lists), late, strict=True)]


def _start_bytes(job: Workload, place: Place) -> float:
    """`cost.memory.start_bytes` of the fullest rank, where tensor-parallel ranks hold equal parts."""
    expert, size = job.axes.expert, DTYPE_BYTES[job.compute_dtype]
    largest, of_experts = _largest(job.model, expert)
    scheme = _gathered_scheme(job)
    gathered = [
        numel * size
        for numel, of in ((max(place.numels), job.levels), (place.experts, job.levels_alike))
        if are_gathered(scheme, of)
    ]
    whole = MASTER_BYTES * (of_experts + of_experts / expert)
    return max(MASTER_BYTES * (largest / job.axes.tensor), whole, *gathered, 0)


@cache
def _largest(model: ModelSpec, expert: int) -> tuple[int, int]:
    """Elements of the largest parameter, and of that of a block's experts where ranks divide them."""
    apart = experts_apart(model, expert)
    largest = max(prod(shape) for unit in model.unit_shapes(apart) for shape in unit)
    return largest, max((prod(model.expert_shapes()[name]) for name in apart), default=0)
