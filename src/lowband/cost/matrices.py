"""Whole matrices for optimizers that need them (Muon): what ranks send to their owners, and get back.

As engine/optimizers/matrices.py has it. Of the ranks that share the optimizer's shards one owns each matrix
of P elements, and has `own` of them in its shard: before a step 4 (P - own) bytes of gradients travel to it,
after it as many of new values back, of each unit in one exchange. Owners are dealt out by the cost of the
update, the dearest matrix first, each to the rank with the least to do.
"""

import heapq
from collections.abc import Sequence
from functools import cache
from math import prod

from lowband.cost.collectives import Network
from lowband.cost.memory import MASTER_BYTES
from lowband.cost.numbers import Num
from lowband.spec.mesh import SELF, Levels
from lowband.spec.partition import UnitLayout, intersect, shard_range, shard_ranks

Shape = tuple[int, ...]
NAMES = "matrix_gather", "matrix_return"


def update_cost(shape: Shape) -> float:
    """Relative, of Muon's orthogonalization: products a x b by b x a, a x a by a x a, a x a by a x b."""
    a, b = sorted(shape)
    return 2.0 * a * a * b + a**3


def _matrices(shapes: Sequence[Shape], layout: UnitLayout) -> list[tuple[Shape, int]]:
    """Of a unit, its matrices and where they start; those of experts lie one behind the other."""
    return [
        (shape[-2:], offset + i * prod(shape[-2:]))
        for shape, offset in zip(shapes, layout.offsets, strict=True) if len(shape) > 1
        for i in range(prod(shape[:-2]))
    ]  # fmt: skip


@cache
def moved_numel(units: tuple[tuple[Shape, ...], ...], levels: Levels, optim: str) -> int:
    """Elements that owners lack, of all ranks that share one replica of the shards together.

    units: shapes of each unit with matrices, in its order
    """
    found = list[tuple[float, Shape, int, int]]()
    for shapes in units:
        layout = UnitLayout.of(shapes, levels.world)
        for shape, start in _matrices(shapes, layout):
            found.append((update_cost(shape), shape, start, layout.numel))
    load, moved = [(0.0, rank) for rank in sorted(shard_ranks(levels, optim, 0))], 0
    for cost, shape, start, unit in sorted(found, key=lambda each: -each[0]):
        busy, rank = heapq.heappop(load)
        heapq.heappush(load, (busy + cost, rank))
        numel = prod(shape)
        first, last = intersect((start, start + numel), shard_range(unit, levels, optim, rank))
        moved += numel - (last - first)
    return moved


def exchange_s(
    network: Network, units: tuple[tuple[Shape, ...], ...], levels: Levels, optim: str, parts: int = 1
) -> Num:
    """Seconds in which the owners get the gradients of all units; new values take as long.

    parts: ranks along other axes that share the matrices. A rank sends as many bytes as all do in the mean,
    to each partner alike, and no more messages than a unit has matrices.
    """
    hops, ranks = levels.hops(SELF, optim), levels.size(optim)
    if not units or ranks == 1:
        return 0.0
    sent = MASTER_BYTES * moved_numel(units, levels, optim) / ranks / parts
    most = max(len(_matrices(shapes, UnitLayout.of(shapes, levels.world))) for shapes in units)
    total: Num = 0.0
    inside = 1
    for hop in hops:
        partners = (hop.count - 1) * inside
        messages = min(partners, most)
        total = total + len(units) * messages * network.latency_s(hop.level)
        total = total + sent * partners / (ranks - 1) / network.rate(hop.level)
        inside *= hop.count
    return total + len(units) * network.base_s
