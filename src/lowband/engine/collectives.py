"""Collectives over levels, built from one hop per level.

A gather goes from the outer level inwards, a reduction from the inner level outwards. So each byte crosses
a slow link as seldom as the algorithm allows, and a hop's messages travel on one level's links only.
All buffers are flat; sizes are as `spec.partition` cuts them.

[Note: quantize once per hop] A gather moves the same values through all its hops: each shard is encoded once,
by its owner, and decoded once. A reduction changes the values at every hop, so each hop encodes its own sums;
summing is done in fp32 on decoded values (qgZ, arXiv 2306.10209, section 3.3). From one hop to the next
that is one pass: messages are decoded, summed and encoded again for the next hop's partners.
"""

from itertools import zip_longest
from math import prod

import torch
import torch.distributed as dist

from lowband.engine.ledger import Ledger
from lowband.engine.memory import MemoryMeter
from lowband.engine.topology import BoundHop, Topology
from lowband.engine.wire import decode, decode_sum, encode, is_plain, sum_encode
from lowband.spec.scheme import Scheme
from lowband.spec.wire import Wire

# torch 2.13 renamed these and deprecates the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Collectives:
    """A scheme's messages on one topology. A collective's name gives its wire and its row in the ledger."""

    def __init__(self, scheme: Scheme, topology: Topology, ledger: Ledger, meter: MemoryMeter) -> None:
        self.scheme, self.topology, self.ledger, self.meter = scheme, topology, ledger, meter

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
        message = self._hold(encode(shard.view(1, n), wire, self.scheme.block_size)[0])
        messages = self._hold(message.new_empty(out.numel() // n * message.numel()))
        self._gather_hops(message, messages, hops, name, wire)
        decode(messages.view(-1, message.numel()), out.view(-1, n), wire, self.scheme.block_size)
        self._release(message)
        self._release(messages)

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
                parts = here.view(count, length)
                bound.exchange([parts[bound.coordinate]] * count, parts)
            else:
                _all_gather(here, out[start : start + length], group=bound.group)
            self.ledger.add(bound.hop.level, name, wire, (count - 1) * length * out.element_size())
            start, length = first, count * length

    def reduce_scatter(self, full: torch.Tensor, inner: str, outer: str, name: str) -> torch.Tensor:
        """The sum over `outer` of this rank's shard of `outer`, from every rank's shard of `inner`.

        full: 1D, in the reduce dtype, counted as a buffer; freed once it is sent, if no caller refers to it
        Returns a 1D tensor of full.numel() / (size of outer / size of inner) elements, same dtype, counted
        likewise.
        """
        hops, wire, dtype = self.topology.hops(inner, outer), self._wire(name), full.dtype
        if hops and not is_plain(wire, dtype):
            rows = full.view(hops[0].hop.count, -1)
            del full
            messages, n = self._hold(encode(rows, wire, self.scheme.block_size)), rows.shape[1]
            self._release(rows)
            del rows
            for bound, following in zip_longest(hops, hops[1:]):
                received = self._exchange(messages, bound, name, wire)
                del messages
                if following is None:
                    return self._decode_sum(received, n, dtype, wire)
                parts = following.hop.count
                messages = self._hold(sum_encode(received, n, parts, dtype, wire, self.scheme.block_size))
                self._release(received)
                del received
                n //= parts
        for bound in hops:
            rows = full.view(bound.hop.count, -1)
            del full
            if dist.get_backend(bound.group) == "gloo":
                received = self._exchange(rows, bound, name, "native")
                del rows
                full = self._sum(received)
                del received
            else:
                full = self._native_hop(rows, bound, name)
        return full

    def gather_whole(self, shard: torch.Tensor, inner: str, outer: str, name: str) -> torch.Tensor:
        """This rank's shard of `inner` from the shards of `outer`. Both are counted as buffers, as above."""
        hops = self.topology.hops(inner, outer)
        if not hops:
            return shard
        out = self._hold(shard.new_empty(shard.numel() * prod(bound.hop.count for bound in hops)))
        self.gather(shard, out, inner, outer, name)
        self._release(shard)
        return out

    def _native_hop(self, rows: torch.Tensor, bound: BoundHop, name: str) -> torch.Tensor:
        """One hop by the back end's own reduce-scatter."""
        out = self._hold(torch.empty_like(rows[0]))
        _reduce_scatter(out, rows.view(-1), group=bound.group)
        self._release(rows)
        self.ledger.add(bound.hop.level, name, "native", (bound.hop.count - 1) * out.nbytes)
        return out

    def _exchange(self, messages: torch.Tensor, bound: BoundHop, name: str, wire: Wire) -> torch.Tensor:
        """One message to each partner and one from each: [partners, message length].

        gloo's own reduce-scatter is an all-reduce and sends twice the bytes of this and a local sum.
        """
        received = self._hold(torch.empty_like(messages))
        if bound.back is not None:
            received[bound.coordinate] = messages[bound.coordinate]
            bound.exchange(messages, received)
        else:
            dist.all_to_all_single(received, messages, group=bound.group)
        self._release(messages)
        self.ledger.add(bound.hop.level, name, wire, (bound.hop.count - 1) * messages[0].nbytes)
        return received

    def _sum(self, received: torch.Tensor) -> torch.Tensor:
        """1D, the sum of all rows, in the order of the partners: a reference can repeat it bit by bit."""
        total = self._hold(received[0].clone())
        for i in range(1, len(received)):
            total += received[i]
        self._release(received)
        return total

    def _decode_sum(self, received: torch.Tensor, n: int, dtype: torch.dtype, wire: Wire) -> torch.Tensor:
        """The same of encoded messages of n values."""
        total = self._hold(torch.empty(n, dtype=torch.float32, device=received.device))
        decode_sum(received, total, wire, self.scheme.block_size)
        if dtype != torch.float32:
            self._release(total)
            total = self._hold(total.to(dtype))
        self._release(received)
        return total

    def _hold(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.meter.hold("buffers", tensor)

    def _release(self, tensor: torch.Tensor) -> None:
        self.meter.release("buffers", tensor.nbytes)
