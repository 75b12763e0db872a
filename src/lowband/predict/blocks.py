"""What a micro-batch takes in one block, which is the same at every place of a pipeline."""

from dataclasses import dataclass

import numpy as np

from lowband.cost.collectives import Case, Network, number, seconds, share
from lowband.cost.compute import Computer, Work, work
from lowband.cost.context_load import attended, merges
from lowband.cost.memory import are_gathered
from lowband.cost.numbers import GIGA, Num, join
from lowband.cost.stragglers import slower
from lowband.predict.context import waits
from lowband.predict.exposed import Waits
from lowband.predict.footprint import kept
from lowband.predict.tiers import way
from lowband.predict.workload import Workload
from lowband.spec.mesh import SELF, WORLD


@dataclass(frozen=True)
class OfBlocks:
    """Of a micro-batch in one block, what is the same at every place.

    shards, other: links as collectives of sharding, and as all else has them
    middle, w:     what a device of the middle computes, and the slowest one, which is longer by `wait`
    tp, host:      seconds beside the computation, of a forward and a backward; ends: of the whole micro-batch
    along:         context
    stash, fetch:  copies of activations
    """

    shards: Network
    other: Network
    computer: Computer
    middle: Work
    w: Work
    wait: float
    overlap: float
    tp: tuple[Num, Num]
    host: tuple[Num, Num]
    ends: Num
    along: Waits
    stash: Num
    fetch: Num


# By micro-batch, whether hooks take time, and how often weights are cast.
Known = dict[tuple[float, bool, float], OfBlocks]


def known_blocks(job: Workload, case: Case, known: Known) -> OfBlocks:
    """The same as `of_blocks`, computed once for the jobs that share it. job: one point"""
    key = float(job.micro_batch), _is_hooked(job), float(_weight_casts(job))
    if key not in known:
        known[key] = of_blocks(job, case)
    return known[key]


def of_blocks(job: Workload, case: Case) -> OfBlocks:
    """With every constant taken at `case`; for all micro-batches of `job` at once."""
    network = Network(job.machine, job.stack, case, job.faster, own=job.collectives)
    computer = Computer(job.machine, job.compute_dtype, case, job.stack.products)
    middle = work(
        computer, job.model, job.micro_batch, job.seq_len, job.recompute, job.stack.attention, job.axes,
        job.stack.dropout, attended(job.layout, job.stack.attention == "plain"), merges(job.layout), job.load,
        job.recomputed, job.lora, job.stack.gated_kept, _weight_casts(job), job.stack.operations,
    )  # fmt: skip
    wait = _wait(job, case)
    w = Work(**{name: (1 + wait) * time for name, time in vars(middle).items()})  # of the slowest device
    overlap = share(job.stack.overlap, case)
    other = Network(job.machine, job.stack, case, job.faster, shards=False)
    once, behind = _exchanges_s(job, other)
    forward, backward = (
        _beside(job, w.forward, once, 1, case),
        _beside(job, w.backward + w.recompute, behind + job.again * once, 1 + job.again, case),
    )
    tp, host = zip(forward, backward, strict=True)
    along = waits(job, other, w, overlap)
    ends = ends_s(job, case)
    return OfBlocks(
        network, other, computer, middle, w, wait, overlap, tp, host, ends, along, *_copies_s(job, case)
    )


def _weight_casts(job: Workload) -> Num:
    """The share of micro-batches in which weights are cast. Casts that are kept last as long as the weights:
    a step, or where these are gathered until they are freed."""
    if not job.stack.keeps_casts:
        return 1
    on_host = job.placed is not None and job.placed.weights is not None
    gathered = on_host or are_gathered(job.scheme, job.levels)
    return (job.gathers[0] if gathered else 1) / job.accumulation


def _copies_s(job: Workload, case: Case) -> tuple[Num, Num]:
    """Seconds of a block's forward, and of its backward, that copy a micro-batch's activations."""
    if job.recompute != "host":
        return 0.0, 0.0
    host, copied = way(job, "host", case), job.micro_batch * job.own_tokens * kept(job).host / GIGA
    return copied / host.stash, copied / host.fetch


def _wait(job: Workload, case: Case) -> float:
    """The share of its computation by which a step on the slowest device is longer."""
    spread = job.machine.device.speed_spread
    return 0.0 if spread is None else slower(job.ranks, number(spread, case))


def _exchanges_s(job: Workload, network: Network) -> tuple[Num, Num]:
    """Seconds of a block's exchanges along tensor, of a forward and of a backward (cost/contents.py).

    What enters attention with a latent is narrower than what leaves it. Where ranks divide tokens, a pass
    gathers the one and reduces the other, each half of an all-reduce; else only a backward reduces the one.
    """
    mlp = 0 if job.model.parallel_block else job.model.dense_share
    hidden, latent = job.model.hidden, job.model.latent
    leaving = _all_reduce_s(job, network, hidden)
    entering = leaving if latent is None else _all_reduce_s(job, network, latent.entering(hidden))
    if job.stack.sequence_parallel:
        return (mlp * leaving + (leaving + entering) / 2,) * 2
    return mlp * leaving + leaving, mlp * leaving + entering


def _beside(job: Workload, computed_s: Num, tp_s: Num, passes: float, case: Case) -> tuple[Num, Num]:
    """What a block's pass takes beyond its computation: tensor parallelism's collectives, and the host.

    tp_s: of these collectives; passes: 2 for a backward with a recomputed forward, in the mean over layers,
    each of which runs the hooks
    """
    hidden = 0.0 if job.stack.tensor_overlap is None else share(job.stack.tensor_overlap, case)
    on_device = join(computed_s, tp_s, hidden)
    launch = seconds(job.stack.launch_us, case)
    wait = passes * seconds(job.stack.unit_us, case) if _is_hooked(job) else 0.0
    return on_device - computed_s, wait + np.maximum(launch - on_device, 0)


def _is_hooked(job: Workload) -> bool:
    """Whether something hooks a unit: nothing where every rank has whole gradients."""
    return job.scheme.grads != SELF


def ends_s(job: Workload, case: Case = "value") -> Num:
    """Seconds that a micro-batch waits along tensor for rows of the embedding, whose vocabulary is cut, and
    for the gradient of the head's input."""
    network = Network(job.machine, job.stack, case, job.faster, shards=False)
    return (2 if job.axes.has_both_ends else 1) * _all_reduce_s(job, network, job.model.hidden)


def _all_reduce_s(job: Workload, network: Network, features: int) -> Num:
    """Seconds to all-reduce 16-bit features of each of a micro-batch's tokens over tensor-parallel ranks."""
    if job.axes.tensor == 1:
        return 0.0
    hops = job.mesh.levels("tensor").hops(SELF, WORLD)
    return network.all_reduce_s(hops, 2 * job.micro_batch * job.own_tokens * features)
