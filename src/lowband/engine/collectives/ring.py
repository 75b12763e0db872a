"""The steps of a flat collective: one ring over all its partners, in rank order, as NCCL and RCCL run it.

In each of n - 1 steps a rank sends one part of the buffer to its successor and receives one from its
predecessor. A gather passes shards on, a reduction sums: the sum of a part starts at the successor of its
owner and is complete where it arrives at its owner. So a ring adds up in its own order, not in that of hops.

A buffer's parts lie in the order of the shards, innermost coordinate first (spec.partition); `in_rank_order`
is the ring's view of them.
"""

from collections.abc import Sequence

import torch

from lowband.engine.transport.axis import BoundHop
from lowband.spec.mesh import Joined


def in_rank_order(parts: torch.Tensor, joined: Joined) -> torch.Tensor:
    """A view of [partners, n] parts by partner: [..., n], an axis per hop, outermost first."""
    counts = [hop.count for hop in joined.hops]
    axes = [*reversed(range(len(counts))), len(counts)]
    return parts.view(*counts, -1).permute(axes)


def gather_around(parts: Sequence[torch.Tensor], bound: BoundHop, name: str) -> None:
    """On gloo: fill all parts, which are given by partner, from each partner's own one."""
    count, here = bound.hop.count, bound.coordinate
    for step in range(count - 1):
        bound.pass_on(parts[(here - step) % count], parts[(here - step - 1) % count], name)


def sum_around(parts: Sequence[torch.Tensor], received: torch.Tensor, bound: BoundHop, name: str) -> None:
    """On gloo: leave the sum of all partners' parts for this rank in `received`; overwrites `parts`.

    parts: given by partner; received: of a part's size, any values
    """
    count, here = bound.hop.count, bound.coordinate
    for step in range(1, count):
        bound.pass_on(parts[(here - step) % count], received, name)
        if step < count - 1:
            parts[(here - step - 1) % count].add_(received)
    received += parts[here]
