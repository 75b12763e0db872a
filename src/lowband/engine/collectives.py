"""Collectives over levels, built from one hop per level.

A gather goes from the outer level inwards, a reduction from the inner level outwards. So each byte crosses
a slow link as seldom as the algorithm allows, and a hop's messages travel on one level's links only.
All buffers are flat; sizes are as `spec.partition` cuts them.
"""

import torch
import torch.distributed as dist

from lowband.engine.ledger import Ledger
from lowband.engine.topology import BoundHop, Topology

# torch 2.13 renamed these and deprecates the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collectives:
    """The engine's messages on one topology, each counted in the ledger under its purpose."""

    def __init__(self, topology: Topology, ledger: Ledger) -> None:
        self.topology, self.ledger = topology, ledger

    def gather(self, shard: torch.Tensor, out: torch.Tensor, inner: str, outer: str, purpose: str) -> None:
        """Fill `out` (this rank's shard of `inner`) from the shards of `outer`.

        shard: 1D; may be this rank's own place inside `out`
        out:   1D, shard.numel() x (size of outer / size of inner), same dtype
        """
        hops = self.topology.hops(inner, outer)
        start, stop = self._place(out.numel(), hops)
        place = out[start:stop]
        if place.data_ptr() != shard.data_ptr():
            place.copy_(shard)
        for bound in reversed(hops):
            count, length = bound.hop.count, stop - start
            first = start - bound.coordinate * length
            _all_gather(out[first : first + count * length], out[start:stop], group=bound.group)
            self._count(bound, purpose, (count - 1) * length * out.element_size())
            start, stop = first, first + count * length

    def reduce_scatter(self, full: torch.Tensor, inner: str, outer: str, purpose: str) -> torch.Tensor:
        """The sum over `outer` of this rank's shard of `outer`, from every rank's shard of `inner`.

        full: 1D, in the dtype that is sent and summed; its contents are lost
        Returns a 1D tensor of full.numel() / (size of outer / size of inner) elements.
        """
        for bound in self.topology.hops(inner, outer):
            full = self._reduce_hop(full, bound, purpose)
        return full

    def all_reduce(self, tensor: torch.Tensor, inner: str, outer: str, purpose: str) -> None:
        """Sum over the ranks between two levels, in place, as a reduction outwards and a gather back."""
        if self.topology.hops(inner, outer):
            part = self.reduce_scatter(tensor, inner, outer, purpose)
            self.gather(part, tensor, inner, outer, purpose)

    def _reduce_hop(self, full: torch.Tensor, bound: BoundHop, purpose: str) -> torch.Tensor:
        count = bound.hop.count
        length = full.numel() // count
        self._count(bound, purpose, (count - 1) * length * full.element_size())
        if dist.get_backend(bound.group) != "gloo":
            out = full.new_empty(length)
            _reduce_scatter(out, full, group=bound.group)
            return out
        # gloo's own reduce_scatter is an all-reduce and sends twice the bytes. The sum goes in the order of
        # the partners, so that a reference can repeat it bit by bit.
        parts = torch.empty_like(full)
        dist.all_to_all_single(parts, full, group=bound.group)
        total = parts[:length].clone()
        for i in range(1, count):
            total += parts[i * length : (i + 1) * length]
        return total

    def _place(self, numel: int, hops: list[BoundHop]) -> tuple[int, int]:
        """Where this rank's outermost shard lies inside a buffer of `numel` elements."""
        start = 0
        for bound in hops:
            numel //= bound.hop.count
            start += bound.coordinate * numel
        return start, start + numel

    def _count(self, bound: BoundHop, purpose: str, sent_bytes: int) -> None:
        self.ledger.add(bound.hop.level, purpose, "native", sent_bytes)
