"""Seconds of one optimizer step, term by term, with overlap as if all collectives shared one lane.

Each unit is gathered while the previous one computes, and reduced while the backward continues. Our engine
has a lane per level (engine/transport/lane.py), so g and r on different levels can overlap: for it the
exposed time below is an upper bound. With L blocks on a rank, and per block forward f, backward b
(recomputation included), gathers G (forward) and g (backward) and reduction r, one micro-batch takes

    forward   G_root + G + (L - 1) join(f, G) + f + head
    backward  join(head, g) + (L - 1) join(b, g + r) + b + r + r_root

where f and b include the host's: what the device waits for, and what launching takes beyond the device's
computation; and
    join(x, y) = max(x, y) + (1 - overlap) min(x, y)      overlap 1: perfect

The first micro-batch's forward also gathers updated weights; the last one's backward also reduces to the
optimizer level and over replicas. In a pipeline a stage's units are gathered whenever the schedule's list
comes to it, each behind one micro-batch, and reduced once a step: those of the stage that ends last behind
nothing, the others behind the last micro-batch (cost/stages.py).
Time beyond a pass's computation is exposed communication, attributed to collectives in proportion to their
time in the lane (exposed.py).

Replicas that meet seldom wait for each other besides (meeting.py).

Tensor parallelism adds, per block, two all-reduces of the activations in forward and in backward (and in full
recomputation), hidden only where the stack hides them. A pipeline over p ranks, v stages on each, adds its
idle time (bubble.py), (p - 1) / v passes of a micro-batch where M >= p and no backward is split, and
sends each micro-batch's activations v times each way (stage_messages.py), which a stack waits for, or which
travel beside the computation, as far as the schedule has something to compute meanwhile
(cost/stages_step.py). Breadth-first (Lamy-Poirier, arXiv 2211.05953) runs all M micro-batches through a unit
in turn, so a unit is gathered and reduced once per step, not once per micro-batch, behind M f or M b.

Ranks along context compute with their part of the tokens, attention as long as the one that has most of it
(cost/context_load.py), and wait in each block for what does not hide behind it (context.py): item `context`.

Tokens that other ranks have experts for travel there and back, and a block waits (experts.py): item
`experts`. Experts that ranks divide are units of their own, gathered and reduced over the ranks with the same
ones, beside their block's. Ranks along tensor divide attention alone: one all-reduce a pass, not two.

Muon's whole matrices travel to their owners before the update, and back behind it (cost/matrices.py): items
`exposed_matrix_gather` and `exposed_matrix_return`.

States beyond the device add what copies do not hide, and the host's update (tiers.py): items `stash`,
`host_update` and `fetch`. Activations that wait on the host leave in a block's forward and come back in its
backward, in the stream of the computation, as our engine copies them: so its passes are longer by both, items
`stash` and `fetch`, too.

All computation takes as long as on the slowest of the ranks (cost/stragglers.py); what it takes beyond a
middle device's is the item `straggler`.
"""

from dataclasses import dataclass

from lowband.cost.collectives import Case
from lowband.cost.compute import Computer, muon_flops
from lowband.cost.memory import MOMENT_BYTES
from lowband.cost.numbers import Num, stacked
from lowband.predict.blocks import Known, OfBlocks, known_blocks, of_blocks
from lowband.predict.bubble import along_pipeline
from lowband.predict.experts import route_waits
from lowband.predict.exposed import Passes, Waits, total
from lowband.predict.lanes import lanes, matrices_s
from lowband.predict.meeting import meeting_s
from lowband.predict.place import Place, alike, unlike
from lowband.predict.tiers import tier_waits
from lowband.predict.workload import Workload
from lowband.spec.step import BACKWARD_GATHER, FORWARD_GATHER, STEP

ITEMS = (
    "forward", "recompute", "backward", "optimizer", "straggler", "host", "tensor_parallel",
    "context", "experts", "pipeline_exchange", "bubble", "stash", "host_update", "fetch",
    *(f"exposed_{row.name}" for row in STEP),
)  # fmt: skip

COMPUTED = ("forward", "recompute", "backward", "optimizer")


@dataclass(frozen=True)
class StepTime:
    """items: seconds by ITEMS, adding up to `total`; lane: seconds by collective, hidden or not."""

    total: Num
    items: dict[str, Num]
    lane: dict[str, Num]


def step_time(job: Workload, case: Case = "value", known: Known | None = None) -> StepTime:
    """Time of one optimizer step of `job`, with every constant taken at `case`.

    known: what blocks take, kept from one call to the next, for jobs that differ in nothing but their scheme
    and micro-batches, and for one `case`
    """
    if not job.axes.is_uneven:
        return _at(alike(job), job, case, of_blocks(job, case))
    shape, points = job.points()
    found = [_longest(one, case, {} if known is None else known) for one in points]
    items, lane = (stacked(shape, [getattr(step, name) for step in found]) for name in ("items", "lane"))
    return StepTime(total(items, items), items, lane)


def _longest(job: Workload, case: Case, known: Known) -> StepTime:
    """Of uneven stages, at the place where a step is longest. job: one point"""
    of = known_blocks(job, case, known)
    return max((_at(place, job, case, of) for place in unlike(job)), key=lambda step: float(step.total))


def _at(place: Place, job: Workload, case: Case, of: OfBlocks) -> StepTime:
    w, along, overlap = of.w, of.along, of.overlap
    root, block = lanes(job, place, of.shards, of.computer)
    blocks, micro_batches = place.blocks, job.accumulation
    (tp_forward_s, tp_backward_s), (forward_host_s, backward_host_s) = of.tp, of.host
    routes = route_waits(job, place, of.other, w.experts)
    waited = along.forward + routes.forward + of.stash, along.backward + routes.backward + of.fetch
    forward_s = w.forward + tp_forward_s + waited[0] + forward_host_s  # of one block and micro-batch
    backward_s = w.backward + w.recompute + tp_backward_s + waited[1] + backward_host_s
    matrices = matrices_s(job, place, of.shards)  # between the last backward and the update, and behind it
    items: dict[str, Num] = {**dict.fromkeys(ITEMS, 0.0), **{f"exposed_{k}": v for k, v in matrices.items()}}
    items |= _in_passes(job, place, of, routes)

    def add(name: str, time: Num) -> None:
        items[name] = items[name] + time

    passes = Passes(job, place, root, block, forward_s, backward_s, place.heads * w.head_backward, overlap)
    for name, time in passes.exposed():
        add(f"exposed_{name}", time)
    if job.is_in_stages:
        sent, idle = along_pipeline(job, place, w, forward_s, backward_s, of.other)
        add("pipeline_exchange", sent)
        add("bubble", idle)
    in_forwards = micro_batches * (blocks * forward_s + place.heads * w.head_forward)
    in_backwards = micro_batches * (blocks * backward_s + place.heads * w.head_backward)
    tiers = tier_waits(job, place, case, in_forwards, in_backwards, overlap)
    for name, time in (("stash", tiers.stash), ("host_update", tiers.update), ("fetch", tiers.fetch)):
        add(name, time)
    add("optimizer", tiers.on_device * _optimizer_s(job, place, of.computer))
    add("straggler", of.wait * sum((items[name] for name in COMPUTED), start=0.0))
    for name, time in meeting_s(job, place, root, block, total(items, items), overlap).items():
        add(name, time)
    times = {"pass": job.passes, "step": 1, "sync": 1 / job.scheme.period}
    often = {r.name: times[r.every] for r in STEP}
    often |= dict(zip((FORWARD_GATHER.name, BACKWARD_GATHER.name), place.gathers, strict=True))
    lane = {name: n * (root.get(name, 0.0) + blocks * block.get(name, 0.0)) for name, n in often.items()}
    lane |= {name: micro_batches * time for name, time in along.lane.items()} | dict(routes.lane) | matrices
    return StepTime(total(items, items), items, lane)


def passes_s(job: Workload) -> dict[str, Num]:
    """Items of a step that are the same under any scheme, where all stages are alike: without collectives of
    sharding, the optimizer, messages between stages and idle time. The straggler's is that of the passes."""
    of, place = of_blocks(job, "value"), alike(job)
    items = _in_passes(job, place, of, route_waits(job, place, of.other, of.w.experts))
    return items | {"straggler": of.wait * (items["forward"] + items["backward"] + items["recompute"])}


def _in_passes(job: Workload, place: Place, of: OfBlocks, routes: Waits) -> dict[str, Num]:
    """Items of a step's passes, of all micro-batches: what is computed, and what is beside it."""
    one, along, blocks, many = of.middle, of.along, place.blocks, job.accumulation
    return {
        "forward": many * (blocks * one.forward + place.heads * one.head_forward),
        "backward": many * (blocks * one.backward + place.heads * one.head_backward),
        "recompute": many * blocks * one.recompute,
        "host": many * blocks * sum(of.host),
        "tensor_parallel": many * (blocks * sum(of.tp) + place.heads * of.ends),
        "context": many * (blocks * (along.forward + along.backward) + along.once),
        "experts": many * blocks * (routes.forward + routes.backward) + routes.once,
        "stash": many * blocks * of.stash,
        "fetch": many * blocks * of.fetch,
    }


def _optimizer_s(job: Workload, place: Place, computer: Computer) -> Num:
    """Seconds of the optimizer and, in the mean over a period, of the outer one."""
    levels, sync = job.levels, job.scheme.sync
    numel = sum(job.adapters or place.numels)
    of_experts = sum(place.expert_numels) / job.levels_alike.size(job.scheme.optim)
    optimizer = computer.adam_s(
        numel / levels.size(job.scheme.optim) + of_experts, MOMENT_BYTES[job.stack.optimizer]
    )
    if job.stack.optimizer == "muon":  # each matrix on one of the ranks that share its optimizer's state
        shared = levels.size(job.scheme.optim) * job.axes.tensor * job.axes.pipeline
        optimizer = optimizer + computer.matmul_s(muon_flops(job.model) / shared)
    if sync is None:
        return optimizer
    outer = computer.outer_s(numel / levels.size(sync.beyond), numel / levels.world, sync.has_momentum)
    return optimizer + outer / sync.every
