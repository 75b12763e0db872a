"""Bytes per rank of each state, in closed form.

    weights    b_c N / |weights|     0 where the master shard takes their place (`keeps_weights_copy`)
    secondary  b_c N / |secondary|
    grads      4 N / |grads|         4 N / |optim| without accumulation, and breadth-first: none kept at the
                                     grads level; 2 instead of 4 where gradients are summed in bf16;
                                     b_r N / |optim| for an optimizer that takes them in the reduce dtype
                                     (`averages_exactly`)
    optim      4 N / |optim| master weights + 8 N / |optim| Adam moments
    optim@host, optim@disk    the same in another tier than the device (spec.tiers). Then there are, too,
    grads@host                4 N / |optim| averaged gradients; those at the grads level stay on the device
    buffers@host              a unit's new weights, b_c N / |optim|; of a disk the states of two units, of
                              which one is updated while the other is read or written, or which are read in
                              a backward, before their step
    weights@host              b_c N / |optim| with a disk: new weights, until they are fetched
               Of units that are updated on the device gradients stay on it, and so do, beside their copies of
               the weights, b_c N / |optim| new ones where these are over another level than weights. Their
               states are in its buffers as those of a disk are in the host's. Late updates hold gradients of
               two steps, and new weights in the compute dtype, too
    weights@host, weights@disk    b_c N / |weights|, in place of `weights`; of a disk there is a unit's shard
                              in `buffers@host` while it is read or written
    anchor     4 N / |replica|       with sync, but for one partner at a time: the weights agreed on last
    outer      4 N / |world|         with sync: the outer optimizer's momentum, if it has one
    in_flight  4 N / |replica|       with a delayed sync: what is sent, then the update, while it is on its
                                     way; of the fragments that are on their way at once. Buffers count what
                                     is being sent once more
    gathered   b_c (root + the two largest blocks): unit in use, unit being gathered, and the root, which
               stays; 0 where the weights are not sharded, and on the device
    buffers    gradients in flight and collectives' send and receive buffers: see cost/buffers.py
    sums       4 (root + the largest block), breadth-first and with accumulation: gradients of the unit in use
               and of the root, summed over micro-batches before they are reduced
    start      of a module that is initialised on the meta device: the larger of the largest parameter in fp32
               and, where units are gathered, the largest one in the compute dtype; only at the start

N: elements of a unit, padding included; b_c, b_r: bytes of the compute and the reduce dtype; |level|: ranks
in one group of the level. Source: ZeRO's budget of 16 bytes per parameter (arXiv 1910.02054, section 3), with
each state sharded over its own level.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import TypeVar

from lowband.cost.buffers import buffer_bytes
from lowband.cost.numbers import Num
from lowband.spec.mesh import SELF, Levels
from lowband.spec.partition import UnitLayout, shard_range
from lowband.spec.scheme import Scheme
from lowband.spec.step import BACKWARD_GATHER, FORWARD_GATHER, Order, Pattern, passes
from lowband.spec.sync import Sync
from lowband.spec.tiers import DEVICE, DISK, HOST, Tier, at
from lowband.spec.wire import DTYPE_BYTES

N = TypeVar("N", int, Num)

MASTER_BYTES = 4
GRAD_BYTES = 4  # accumulated in fp32
ADAM_MOMENT_BYTES = 8
STATE_BYTES = MASTER_BYTES + ADAM_MOMENT_BYTES  # of a parameter, read and written by each step
# Of other optimizers: two moments of a byte and their scales (arXiv 2110.02861); Muon's momentum (Jordan et
# al., 2024). The few values that are no matrices count as if they were.
MOMENT_BYTES = {"adamw": ADAM_MOMENT_BYTES, "adamw8bit": 2 * (1 + 4 / 256), "muon": 4}


def are_gathered(scheme: Scheme, levels: Levels) -> bool:
    """Whether a unit's weights are gathered for each use: from other ranks, or from another tier."""
    return bool(levels.hops(SELF, scheme.weights)) or scheme.weights_tier != DEVICE


def keeps_weights_copy(scheme: Scheme, levels: Levels, computes_in_fp32: bool) -> bool:
    """Whether a copy of the weights in the compute dtype is kept beside the fp32 master shard.

    Not if weights and optimizer shards coincide and either their dtypes do too (the master is the weights) or
    the weights are gathered anyway (the master is cast as it enters the gather).
    """
    if levels.hops(scheme.weights, scheme.optim) or scheme.tiers:
        return True
    return not (computes_in_fp32 or are_gathered(scheme, levels))


def keeps_secondary(scheme: Scheme, levels: Levels) -> bool:
    """Whether the secondary shard is kept: if its group is smaller than that of the weights, or if forward
    and backward would round otherwise what they gather: both are to compute with the same weights.
    """
    if scheme.secondary is None or not levels.hops(SELF, scheme.weights):
        return False
    is_inside = bool(levels.hops(scheme.secondary, scheme.weights))
    return is_inside or scheme.wire(FORWARD_GATHER.name) != scheme.wire(BACKWARD_GATHER.name)


def averages_exactly(ranks: int) -> bool:
    """Whether a sum over so many ranks has its average in a 16-bit dtype, too: else it is taken in fp32."""
    return ranks & (ranks - 1) == 0


def state_bytes(
    unit_numels: Sequence[int],
    scheme: Scheme,
    levels: Levels,
    compute_dtype: str,
    reduce_dtype: str,
    accumulation: int,
    backend: str,
    pattern: Pattern = "hops",
    order: Order = "depth",
    fused_adamw: bool = False,
    summed_bytes: int = GRAD_BYTES,
) -> dict[str, int]:
    """Peak bytes per rank by kind, with Adam. The kinds peak at different times: their sum is an upper bound.

    unit_numels: elements per unit, padding included, the root's first
    accumulation, order: micro-batches per step, and the order in which units compute them
    backend:     torch.distributed's backend
    pattern:     how collectives run
    fused_adamw: whether the optimizer takes gradients in the reduce dtype
    summed_bytes: of a gradient that is kept and summed over micro-batches
    """
    numel = sum(unit_numels)
    b_c = DTYPE_BYTES[compute_dtype]
    secondary = 0
    if keeps_secondary(scheme, levels) and scheme.secondary is not None:
        secondary = b_c * numel // levels.size(scheme.secondary)
    blocks = sorted(unit_numels[1:])
    is_gathered = are_gathered(scheme, levels)
    keeps_grads = passes(accumulation, order) > 1
    is_reduced = fused_adamw and averages_exactly(levels.world)
    grad_bytes = DTYPE_BYTES[reduce_dtype] if is_reduced else summed_bytes
    at_grads = summed_bytes * numel // levels.size(scheme.grads) if keeps_grads else 0
    summed = unit_numels[0] + blocks[-1] if accumulation > 1 and not keeps_grads else 0
    of_messages = levels, compute_dtype, reduce_dtype, backend, pattern
    parts = []  # each of units whose states are in one place
    for placed, numels in scheme.parts(unit_numels):
        is_kept = keeps_weights_copy(placed, levels, compute_dtype == "fp32")
        here = {
            "weights": b_c * sum(numels) // levels.size(scheme.weights) if is_kept else 0,
            "grads": grad_bytes * sum(numels) // levels.size(scheme.optim),
            "optim": STATE_BYTES * sum(numels) // levels.size(scheme.optim),
            "buffers": buffer_bytes(numels, placed, *of_messages),
        }
        parts.append(beyond_bytes(numels, placed, levels, b_c, here))
    of_parts = together(parts)
    return {
        "weights": of_parts.pop("weights"),
        "secondary": secondary,
        "grads": max(at_grads, of_parts.pop("grads")),
        "optim": of_parts.pop("optim"),
        "gathered": b_c * (unit_numels[0] + sum(blocks[-2:])) if is_gathered else 0,
        "buffers": of_parts.pop("buffers"),
        **of_parts,
        **({"sums": summed_bytes * summed} if summed else {}),
        **replica_bytes(numel, levels.size(scheme.level("replica")), levels.world, scheme.sync),
        **in_flight_bytes(unit_numels, levels.size(scheme.level("replica")), scheme.sync),
    }


def beyond_bytes(
    unit_numels: Sequence[int],
    scheme: Scheme,
    levels: Levels,
    compute_bytes: int,
    device: Mapping[str, int],
) -> dict[str, int]:
    """What units hold whose states are all in one place, by kind, on the device and in other tiers.

    compute_bytes: of the compute dtype
    device: were all on the device
    """
    ranks, held, numel = levels.size(scheme.optim), dict(device), sum(unit_numels)
    two = largest_two(unit_numels) // ranks
    buffers = 0
    if (tier := scheme.optim_tier) != DEVICE:
        by_host, on_device = (0, numel // ranks) if scheme.is_moved else (numel // ranks, 0)
        held |= {"optim": 0} | optim_beyond(tier, by_host, on_device, compute_bytes, scheme.is_late)
        if scheme.is_moved:
            held["weights"] += compute_bytes * on_device if levels.hops(scheme.weights, scheme.optim) else 0
            held |= {"buffers": max(device["buffers"], STATE_BYTES * two), at("buffers", HOST): 0}
        else:
            held["grads"] = 0
            buffers = max(on_their_way(tier, max(unit_numels) // ranks, two, compute_bytes))
    if (tier := scheme.weights_tier) != DEVICE:
        ranks = levels.size(scheme.weights)
        held |= weights_beyond(tier, held, compute_bytes * numel // ranks)
        held["weights"] += int(scheme.resident * (compute_bytes * numel // ranks))
        if tier == DISK:
            buffers = max(buffers, compute_bytes * max(unit_numels) // ranks)
    return {**held, at("buffers", HOST): buffers} if buffers else held


def together(of_units: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """The bytes of several kinds of units, by kind of memory: their messages are not held at once."""
    return {
        kind: (max if kind.startswith("buffers") else sum)(held.get(kind, 0) for held in of_units)
        for kind in dict.fromkeys(kind for held in of_units for kind in held)
    }


def optim_beyond(tier: Tier, by_host: N, on_device: N, compute_bytes: int, is_late: bool) -> dict[str, N]:
    """What lies beyond the device with optimizer states that lie in a tier, by kind, but for buffers.

    by_host, on_device: a rank's elements, by where they are updated
    """
    there = {
        at("optim", tier): STATE_BYTES * (by_host + on_device),
        at("grads", HOST): (2 if is_late else 1) * GRAD_BYTES * by_host,  # of so many steps at once
    }
    if tier == DISK or is_late:  # new ones, until they are fetched
        there[at("weights", HOST)] = compute_bytes * by_host
    return there


def on_their_way(tier: Tier, largest: N, two: N, compute_bytes: int) -> tuple[N, N | int]:
    """Buffers in host memory, of which the larger counts: of new weights, and of states.

    largest, two: elements of the largest unit that the host updates, and of the largest two in turn
    """
    return compute_bytes * largest, STATE_BYTES * two if tier == DISK else 0


def weights_beyond(tier: Tier, held: Mapping[str, N], size: N) -> dict[str, N]:
    """The copy for the computation in a tier, in place of that on the device. held: what else lies there"""
    return {"weights": 0 * size, at("weights", tier): held.get(at("weights", tier), 0) + size}


def largest_two(numels: Sequence[int]) -> int:
    """Elements of the largest two of units in turn, of which one comes while the other leaves."""
    return max(map(sum, pairwise([*numels, 0])), default=0)


def replica_bytes(numel: int, replica: int, world: int, sync: Sync | None) -> dict[str, int]:
    """States of replicas that meet seldom; none without sync. replica, world: ranks in a replica, in all"""
    if sync is None:
        return {}
    anchor = {"anchor": MASTER_BYTES * numel // replica} if sync.has_anchor else {}
    outer = {"outer": MASTER_BYTES * numel // world} if sync.has_momentum else {}
    return {**anchor, **outer}


def in_flight_bytes(unit_numels: Sequence[int], replica: int, sync: Sync | None) -> dict[str, int]:
    """What exchanges on their way hold at the peak; nothing without delay. replica: ranks in a replica"""
    if sync is None or not sync.delay:
        return {}
    return {"in_flight": MASTER_BYTES * sync.most_in_flight(unit_numels) // replica}


def start_bytes(
    unit_shapes: Sequence[Sequence[tuple[int, ...]]],
    scheme: Scheme,
    levels: Levels,
    compute_dtype: str,
    rank: int | None = None,
    slice_shapes: Sequence[Sequence[tuple[int, ...]]] | None = None,
) -> int:
    """Peak bytes that a rank holds beside its shards while a module on the meta device is made real.

    One parameter is made at a time, on the ranks that hold a part of it, and if tensor ranks divide it, cut;
    and each unit's gathered buffer is allocated once, before its memory is freed.

    unit_shapes:  of fp32 parameters, per unit
    rank:         None: the fullest rank
    slice_shapes: of a tensor rank's slices of them; default: it has them whole
    """
    peak = 0
    for shapes, wholes in zip(slice_shapes or unit_shapes, unit_shapes, strict=True):
        layout = UnitLayout.of(shapes, levels.world)
        held = [
            shard_range(layout.numel, levels, level, rank or 0) for level in (scheme.optim, scheme.weights)
        ]
        for (a, b), whole in zip(layout.ranges(), map(prod, wholes), strict=True):
            if rank is None or any(max(a, start) < min(b, stop) for start, stop in held):
                peak = max(peak, MASTER_BYTES * (whole + (b - a if b - a < whole else 0)))
        if are_gathered(scheme, levels):
            peak = max(peak, DTYPE_BYTES[compute_dtype] * layout.numel)
    return peak
