"""Collectives over levels, built from one hop per level.

A gather goes from the outer level inwards, a reduction from the inner level outwards. So each byte crosses
a slow link as seldom as the algorithm allows, and a hop's messages travel on one level's links only.
All buffers are flat; sizes are as `spec.partition` cuts them.

[Note: quantize once per hop] A gather moves the same values through all its hops: each shard is encoded once,
by its owner, and decoded once. A reduction changes the values at every hop, so each hop encodes its own sums;
summing is done in fp32 on decoded values (qgZ, arXiv 2306.10209, section 3.3).
"""

import torch
import torch.distributed as dist

from lowband.engine.ledger import Ledger
from lowband.engine.topology import BoundHop, Topology
from lowband.engine.wire import decode, encode, is_plain
from lowband.spec.scheme import Scheme
from lowband.spec.wire import Wire

# torch 2.13 renamed these and deprecates the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_DECODED_AT_ONCE = 2**24  # values; a buffer of 64 MiB
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collectives:
    """A scheme's messages on one topology. A collective's name gives its wire and its row in the ledger."""

    def __init__(self, scheme: Scheme, topology: Topology, ledger: Ledger) -> None:
        self.scheme, self.topology, self.ledger = scheme, topology, ledger

    def _wire(self, name: str) -> Wire:
        wire: Wire = getattr(self.scheme, name, "native")  # what is no part of a step has no wire of its own
        return wire

    def gather(self, shard: torch.Tensor, out: torch.Tensor, inner: str, outer: str, name: str) -> None:
        """Fill `out` (this rank's shard of `inner`) from the shards of `outer`.

        shard: 1D, no part of `out`
        out:   1D, shard.numel() x (size of outer / size of inner) elements, in the native dtype
        """
        hops, wire = self.topology.hops(inner, outer), self._wire(name)
        if is_plain(wire, out.dtype) or not hops:
            self._gather_hops(shard, out, hops, name, "native")
            return
        n = shard.numel()
        message = encode(shard.view(1, n), wire, self.scheme.block_size)[0]
        messages = message.new_empty(out.numel() // n * message.numel())
        self._gather_hops(message, messages, hops, name, wire)
        # Some at a time: all at once would take four bytes for every value of `out`.
        some = max(1, _DECODED_AT_ONCE // n)
        places, rows = out.view(-1, n).split(some), messages.view(-1, message.numel()).split(some)
        for place, row in zip(places, rows, strict=True):
            place.copy_(decode(row, n, wire, self.scheme.block_size))

    def _gather_hops(
        self, shard: torch.Tensor, out: torch.Tensor, hops: list[BoundHop], name: str, wire: Wire
    ) -> None:
        """The same for what travels as it is; `out` is filled in place, hop by hop."""
        length = shard.numel()
        start, part = 0, out.numel()
        for bound in hops:  # where this rank's shard lies: the innermost coordinate cuts first
            part //= bound.hop.count
            start += bound.coordinate * part
        out[start : start + length] = shard
        for bound in reversed(hops):
            count = bound.hop.count
            first = start - bound.coordinate * length
            here = out[first : first + count * length]
            if bound.back is not None:
                parts = here.view(2, length)
                bound.swap(parts[bound.coordinate], parts[1 - bound.coordinate])
            else:
                _all_gather(here, out[start : start + length], group=bound.group)
            self.ledger.add(bound.hop.level, name, wire, (count - 1) * length * out.element_size())
            start, length = first, count * length

    def reduce_scatter(self, full: torch.Tensor, inner: str, outer: str, name: str) -> torch.Tensor:
        """The sum over `outer` of this rank's shard of `outer`, from every rank's shard of `inner`.

        full: 1D, in the reduce dtype; not to be used afterwards
        Returns a 1D tensor of full.numel() / (size of outer / size of inner) elements, same dtype.
        """
        wire = self._wire(name)
        for bound in self.topology.hops(inner, outer):
            if is_plain(wire, full.dtype) and dist.get_backend(bound.group) != "gloo":
                full = self._native_hop(full, bound, name)
            else:
                full = self._exchange_hop(full, bound, name, wire)
        return full

    def all_reduce(self, tensor: torch.Tensor, inner: str, outer: str, name: str) -> None:
        """Sum over the ranks between two levels, in place, as a reduction outwards and a gather back."""
        if self.topology.hops(inner, outer):
            part = self.reduce_scatter(tensor, inner, outer, name)
            self.gather(part, tensor, inner, outer, name)

    def _native_hop(self, full: torch.Tensor, bound: BoundHop, name: str) -> torch.Tensor:
        """One hop by the back end's own reduce-scatter."""
        count = bound.hop.count
        out = full.new_empty(full.numel() // count)
        _reduce_scatter(out, full, group=bound.group)
        self.ledger.add(bound.hop.level, name, "native", (count - 1) * out.numel() * out.element_size())
        return out

    def _exchange_hop(self, full: torch.Tensor, bound: BoundHop, name: str, wire: Wire) -> torch.Tensor:
        """One hop as an all-to-all and a local sum.

        gloo's own reduce-scatter is an all-reduce and sends twice the bytes. The sum goes in the order of the
        partners, so that a reference can repeat it bit by bit.
        """
        count = bound.hop.count
        rows = full.view(count, -1)
        n = rows.shape[1]
        plain = is_plain(wire, full.dtype)
        messages = rows if plain else encode(rows, wire, self.scheme.block_size)
        received = torch.empty_like(messages)
        if bound.back is not None:
            received[bound.coordinate] = messages[bound.coordinate]
            bound.swap(messages[1 - bound.coordinate], received[1 - bound.coordinate])
        else:
            dist.all_to_all_single(received, messages, group=bound.group)
        sent = (count - 1) * messages.shape[1] * messages.element_size()
        self.ledger.add(bound.hop.level, name, "native" if plain else wire, sent)
        if plain:
            total = received[0].clone()
            for i in range(1, count):
                total += received[i]
            return total
        total = decode(received[:1], n, wire, self.scheme.block_size)[0]
        for i in range(1, count):
            total += decode(received[i : i + 1], n, wire, self.scheme.block_size)[0]
        return total.to(full.dtype)
