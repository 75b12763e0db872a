"""Seconds and bytes of what lies beyond the device: in the host's memory, or on a disk (cost/tiers.py).

In a step the gradients of the optimizer's shard go to the host behind the last backward, the host updates
while the device waits, but of states on a disk, and new weights come back behind the next forward, each on a
lane of its own; those of states that come to the device for their update stay there:

    stash     join(B, s) - B     s: gradients in the reduce dtype, B: the step's backwards
    update    what the host takes
    fetch     join(F, f) - F     f: new weights in the compute dtype, F: the step's forwards

An update that is late hides behind F + B: join(F + B, update) - F - B. One of states on a disk takes, as 12
bytes a parameter are read and 12 written beside it, join(update, read + written). With the stack's
`hidden_updates`, as with ours, it hides behind the first of m passes, the next step's: join(F / m, that) -
F / m. What hides behind backwards, two units' reads and two units' writes, is left out.

Weights beyond the device are fetched, this rank's shard of a unit, before each gather, behind forwards and
backwards alike, but for the root's and those of a secondary copy, which backwards have; new ones go there in
place of a step's first fetch. What lies on a disk passes the host: both ways take as long as the slower one.
Each lane is taken to hide behind the same computation as the collectives do, so the sum is an upper bound.
Those that stay on the device (`resident`) are counted access by access.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lowband.cost.collectives import LOW_IS_SLOW, Case
from lowband.cost.memory import GRAD_BYTES, STATE_BYTES, on_their_way, optim_beyond, weights_beyond
from lowband.cost.numbers import GIB, GIGA, Num, join
from lowband.cost.tiers import Beyond, Rates, update_s
from lowband.cost.weights_copies import fetched_bytes
from lowband.errors import UserError
from lowband.predict.place import Place, reused
from lowband.predict.workload import Workload
from lowband.spec.buckets import BUCKET_NUMEL
from lowband.spec.machine import TierName
from lowband.spec.mesh import Levels
from lowband.spec.tiers import DEVICE, HOST, at
from lowband.spec.wire import DTYPE_BYTES


@dataclass(frozen=True)
class TierWaits:
    """Seconds of a step that the device waits for tiers. on_device: the share of the update that it does"""

    stash: Num = 0.0
    update: Num = 0.0
    fetch: Num = 0.0
    on_device: Num = 1.0


def tier_waits(
    job: Workload, place: Place, case: Case, forwards_s: Num, backwards_s: Num, overlap: float
) -> TierWaits:
    """forwards_s, backwards_s: of all of a step's computation"""
    if (beyond := job.placed) is None:
        return TierWaits()
    host = way(job, "host", case)
    if beyond.optim is not None and not host.update:
        raise UserError("the host's update has no rate", where=f"machine '{job.machine.name}'")
    down: Num = 0.0
    up: Num = 0.0
    update: Num = 0.0
    on_device: Num = 1.0
    if beyond.optim is not None:
        of_all = shard(job, place, job.scheme.optim)
        own, by_host = beyond.share * of_all, (beyond.share - beyond.moved) * of_all
        down = by_host * DTYPE_BYTES[job.stack.reduce_dtype] / (GIGA * host.stash)
        up = by_host * DTYPE_BYTES[job.compute_dtype] / (GIGA * host.fetch)
        update = update_s(own, host, beyond.stride)
        on_device = 1 - beyond.share + beyond.moved
        if job.is_late:
            update = join(forwards_s + backwards_s, update, overlap) - forwards_s - backwards_s
        if beyond.optim == "disk":
            disk = way(job, "disk", case)
            update = join(update, own * STATE_BYTES / GIGA * (1 / disk.fetch + 1 / disk.stash), overlap)
            if job.stack.hidden_updates:
                first = forwards_s / job.passes
                update = join(first, update, overlap) - first
    if beyond.weights is not None:
        at = way(job, beyond.weights, case)
        one = shard(job, place, job.scheme.weights) * DTYPE_BYTES[job.compute_dtype] / (GIGA * at.fetch)
        forwards, backwards = fetches(job, place)
        up, down = up + forwards * one, down + backwards * one
    return TierWaits(
        join(backwards_s, down, overlap) - backwards_s,
        update,
        join(forwards_s, up, overlap) - forwards_s,
        on_device,
    )


def fetches(job: Workload, place: Place) -> tuple[Num, Num]:
    """How often a step copies all weights behind forwards, new ones' way there too, and behind backwards."""
    found = [
        (size, size + forward, backward)
        for numels, levels in ((place.numels, job.levels), (place.expert_numels, job.levels_alike))
        for size, forward, backward in ([_fetched(job, place, numels, levels)] if numels else [])
    ]
    of_all, forwards, backwards = (sum(each) for each in zip(*found, strict=True))
    return forwards / of_all, backwards / of_all


def _fetched(job: Workload, place: Place, numels: Sequence[int], levels: Levels) -> tuple[int, Num, Num]:
    """Bytes of units, and what of them a step fetches for forwards, but the first, and for backwards."""
    ranks, stay = levels.size(job.scheme.weights), reused(job, place)
    root, *blocks = (DTYPE_BYTES[job.compute_dtype] * numel // ranks for numel in numels)
    again = len(blocks) - stay
    sizes = [root, *blocks]
    if not job.scheme.resident:  # what is gathered alike together
        sizes, again, stay = [root, sum(blocks[:again]), sum(blocks[again:])], 1, 1

    def fetched(forward: Num, backward: Num) -> tuple[Num, Num]:
        often = [(forward, backward)] * (1 + again) + [(forward, 0)] * stay
        return fetched_bytes(sizes, job.scheme, levels, often)

    if not job.scheme.resident:
        return sum(sizes), *fetched(*place.gathers)
    forward, backward = np.vectorize(fetched, otypes=[float, float])(*place.gathers)  # access by access
    return sum(sizes), forward[()], backward[()]


def shard(job: Workload, place: Place, level: str) -> Num:
    """Parameters of a rank's shard over a level."""
    return sum(place.numels) / job.levels.size(level) + sum(place.expert_numels) / job.levels_alike.size(
        level
    )


def way(job: Workload, tier: TierName, case: Case) -> Rates:
    """Rates of one rank between its device and a tier, all of its node's at once."""
    ranks = min(job.machine.node_size, job.ranks)
    host = Rates.of(job.machine.tier("host"), ranks, LOW_IS_SLOW[case])
    if tier == "host":
        return host
    disk = Rates.of(job.machine.tier(tier), ranks, LOW_IS_SLOW[case])
    return Rates(np.minimum(host.fetch, disk.fetch), np.minimum(host.stash, disk.stash), disk.update)


def moved(job: Workload, place: Place, items: Mapping[str, Num]) -> dict[str, Num]:
    """The items of memory with those beyond the device under names of their own, such as `optim@host`."""
    if (beyond := job.placed) is None:
        return dict(items)
    is_counted = job.scheme.offload is not None  # by unit (cost/memory.py)
    found = {kind: size for kind, size in items.items() if is_counted or not kind.startswith("weights@")}
    size = DTYPE_BYTES[job.compute_dtype]
    copy = shard(job, place, job.scheme.weights) * size
    if beyond.optim is not None and not is_counted:
        of_all = shard(job, place, job.scheme.optim)
        there, on_device = beyond.share * of_all, beyond.moved * of_all
        here, by_host = of_all - there, there - on_device
        found["optim"] = here * STATE_BYTES
        found["grads"] = np.where(
            job.keeps_grads, items["grads"], (here + on_device) * job.stack.summed_bytes
        )
        found["weights"] = np.maximum(items["weights"], beyond.share * copy)  # no master stands in for it
        if job.levels.hops(job.scheme.weights, job.scheme.optim):  # new ones of what returns, until a gather
            found["weights"] = found["weights"] + on_device * size
        found |= optim_beyond(beyond.optim, by_host, on_device, size, job.is_late)
        if job.scheme.optim_tier == DEVICE:  # else these are counted
            found |= _on_their_way(job, place, beyond, by_host, found)
    if beyond.weights is not None:
        found |= weights_beyond(beyond.weights, found, copy)
        found["weights"] = found["weights"] + job.scheme.resident * copy
    return found


def _on_their_way(
    job: Workload, place: Place, beyond: Beyond, by_host: Num, items: Mapping[str, Num]
) -> dict[str, Num]:
    """Buffers, with those of units' gradients, new weights and states on their way. by_host: elements"""
    assert beyond.optim is not None
    ranks, alike = job.levels.size(job.scheme.optim), job.levels_alike.size(job.scheme.optim)
    units = [*(n / ranks for n in place.numels), *(n / alike for n in place.expert_numels)]
    two = sum(sorted(units)[-2:])
    coming = two if beyond.coming is None else beyond.coming / ranks
    largest = max(units) if beyond.staying is None else beyond.staying / ranks
    stashed = largest = np.minimum(largest, by_host)
    if job.levels.world > ranks == 1:  # by bucket: every rank has the whole gradient (spec/buckets.py)
        stashed = np.maximum(largest, np.minimum(by_host, BUCKET_NUMEL))
    here = np.maximum(GRAD_BYTES * stashed, np.where(beyond.moved, STATE_BYTES * coming, 0.0))
    there = np.maximum(*on_their_way(beyond.optim, largest, two, DTYPE_BYTES[job.compute_dtype]))
    kind = at("buffers", HOST)
    return {"buffers": np.maximum(items["buffers"], here), kind: np.maximum(items.get(kind, 0.0), there)}


def held(job: Workload, items: Mapping[str, Num]) -> dict[TierName, Num]:
    """Bytes of a node in each tier that is used."""
    ranks = min(job.machine.node_size, job.ranks)
    return {
        tier: ranks * sum((size for kind, size in items.items() if kind.endswith(f"@{tier}")), start=0.0)
        for tier in job.tiers
    }


def short_by(job: Workload, items: Mapping[str, Num]) -> Num:
    """Bytes per rank by which a node's tiers are too small, that of the fullest one; 0 if they suffice."""
    ranks = min(job.machine.node_size, job.ranks)
    short: Num = 0.0
    for tier, size in held(job, items).items():
        short = np.maximum(short, (size - job.machine.tier(tier).capacity_gib * GIB) / ranks)
    return short
