"""Collectives over levels, built from one hop per level.

A gather goes from the outer level inwards, a reduction from the inner level outwards. So each byte crosses a
slow link as seldom as the algorithm allows, and a hop's messages travel on one level's links only. All
buffers are flat, with the sizes that `spec.partition` computes. A flat collective, the baseline, is one ring
over all partners instead (collectives.ring); joined hops are one exchange between them, for a machine whose
links are all equal. `spec.step.pattern_of` decides which ones are.

[Note: quantize once per hop] A gather moves the same values through all its hops: each shard is encoded once,
by its owner, and decoded once. A reduction changes the values at every hop, so each hop encodes its own sums;
summing is done in fp32 on decoded values (qgZ, arXiv 2306.10209, section 3.3). Between two hops one pass
decodes the messages, sums them and encodes the sums for the next hop's partners.

Collectives are generators that lanes run: see transport.lane, [Note: order].
"""

from collections.abc import Callable, Generator, Sequence
from itertools import zip_longest
from math import prod

import torch

from lowband.engine.collectives.hops import (
    Moves,
    add_partners,
    count_bytes,
    exchange,
    gather_hops,
    place_shard,
    reduce_by_back_end,
)
from lowband.engine.collectives.parts import are_exchanges
from lowband.engine.collectives.ring import in_rank_order, sum_around
from lowband.engine.collectives.wire import decode, decode_sum, encode, is_plain, sum_encode
from lowband.engine.options import Options
from lowband.engine.resident_weights import ResidentWeights
from lowband.engine.transport.axis import Axis, BoundHop
from lowband.engine.transport.call import Call
from lowband.engine.transport.lane import Handle, Work
from lowband.engine.transport.ledger import Ledger
from lowband.engine.transport.meter import MemoryMeter
from lowband.spec.mesh import SELF
from lowband.spec.scheme import Scheme
from lowband.spec.step import Collective, Kind, pattern_of
from lowband.spec.wire import Wire

Reduction = Generator[tuple[str, Sequence[torch.Tensor]], None, torch.Tensor]


class Collectives:
    """A scheme's collectives along one axis. A collective's name selects its wire and its ledger row."""

    def __init__(
        self,
        scheme: Scheme,
        axis: Axis,
        ledger: Ledger,
        meter: MemoryMeter,
        device: torch.device,
        options: Options,
    ) -> None:
        """Unless the pattern is `hops`, all ranks must do this at once: it creates process groups."""
        self.scheme, self.axis, self.ledger, self.meter = scheme, axis, ledger, meter
        self.device, self.lanes, self.options = device, axis.lanes(device), options
        self.residents = ResidentWeights(scheme.resident) if scheme.resident else None
        self._found: dict[tuple[str, str, Kind, bool], list[BoundHop]] = {}
        whole = ((SELF, scheme.level(place)) for place in ("optim", "replica"))
        for inner, outer in (*whole, *(scheme.span(row) for row in scheme.rows)):
            self._hops(inner, outer, "gather", plain=True)

    def submit(
        self,
        unit: str,
        levels: Sequence[str],
        work: Callable[[Call], Work],
        uses: Sequence[torch.Tensor | None] = (),
        ledger: Ledger | None = None,
    ) -> Handle:
        """Start collectives of a unit. Every rank must make the same submissions in the same order.

        levels: the levels of their hops, in order
        uses:   tensors that the caller is about to free
        ledger: where their bytes are counted; default: with all others
        """
        call = Call(self.axis.next_call(), unit, self.ledger if ledger is None else ledger)
        self.axis.order.note(f"'{unit}' over {'-'.join(levels)} (collective {call.number})")

        def counted() -> Work:
            yield from work(call)
            for kind, peak in call.buffers.peak.items():
                self.meter.reach(kind, peak)

        handle = self.lanes.submit(levels or [SELF], counted(), uses)
        if not self.options.overlap:
            handle.wait()
        return handle

    def _hops(self, inner: str, outer: str, kind: Kind, plain: bool) -> list[BoundHop]:
        """A collective's hops, inner first; where they are one, it is on the outermost level."""
        asked = inner, outer, kind, plain
        if asked not in self._found:
            axis = self.axis
            by_pattern = {"hops": axis.hops, "flat": axis.ring, "joined": axis.joined}
            self._found[asked] = by_pattern[pattern_of(self.options.pattern, kind, plain)](inner, outer)
        return self._found[asked]

    def inwards(self, inner: str, outer: str) -> list[str]:
        """The levels of a gather's hops, in order."""
        return [bound.hop.level for bound in reversed(self._hops(inner, outer, "gather", plain=True))]

    def levels_of_reduction(self, row: Collective, dtype: torch.dtype) -> list[str]:
        """The levels of the hops that `reduce` makes for a row and values of a dtype, in order."""
        hops = self._hops(*self.scheme.span(row), row.kind, is_plain(self.scheme.wire(row.name), dtype))
        outwards = [bound.hop.level for bound in hops]
        return [*outwards, *outwards[::-1]] if row.kind == "all_reduce" else outwards

    def reduce(
        self,
        call: Call,
        full: torch.Tensor,
        row: Collective,
        between: Callable[[torch.Tensor], None] = lambda _: None,
    ) -> Reduction:
        """Run a reduction of the step: a `reduce_scatter`, for an all-reduce followed by a gather.

        full: 1D, this rank's shard of the row's inner level, counted as a buffer; see `reduce_scatter`
        between: changes this rank's sum, in place, before an all-reduce gathers the sums
        """
        inner, outer = self.scheme.span(row)
        plain = is_plain(self.scheme.wire(row.name), full.dtype)
        hops = self._hops(inner, outer, row.kind, plain)
        if row.kind == "all_reduce" and plain and are_exchanges(hops):
            yield from self._all_reduce(call, full, hops, row.name, between)
            return full
        moving = [full]
        del full
        moving.append((yield from self.reduce_scatter(call, moving.pop(), inner, outer, row.name)))
        between(moving[0])
        if row.kind == "all_reduce":
            moving.append((yield from self._gather_sums(call, moving.pop(), inner, outer, row.name)))
        return moving.pop()

    def _all_reduce(
        self,
        call: Call,
        full: torch.Tensor,
        hops: list[BoundHop],
        name: str,
        between: Callable[[torch.Tensor], None],
    ) -> Moves:
        """Sum unencoded values in place, hop by hop, and gather the sums."""
        part = full
        for bound in hops:
            yield bound.hop.level, [full]
            part = add_partners(call, part.view(bound.hop.count, -1), bound, name)
        between(part)
        yield hops[-1].hop.level, [full]
        yield from gather_hops(call, full, hops, name, "native")

    def gather(
        self,
        call: Call,
        shard: torch.Tensor,
        out: torch.Tensor,
        inner: str,
        outer: str,
        name: str,
        kind: Kind = "gather",
    ) -> Moves:
        """Fill `out` (this rank's shard of `inner`) from the shards of `outer`.

        shard: 1D, not a part of `out`
        out:   1D, shard.numel() x (size of outer / size of inner) elements, in the native dtype
        """
        wire = self.scheme.wire(name)
        hops = self._hops(inner, outer, kind, is_plain(wire, out.dtype))
        if hops:
            yield hops[-1].hop.level, [shard, out]
        if is_plain(wire, out.dtype) or not hops:
            place_shard(shard, out, hops)
            yield from gather_hops(call, out, hops, name, "native")
            return
        n = shard.numel()
        message = call.hold(encode(shard.view(1, n), wire, self.scheme.block_size)[0])
        messages = call.hold(message.new_empty(out.numel() // n * message.numel()))
        place_shard(message, messages, hops)
        yield from gather_hops(call, messages, hops, name, wire)
        decode(messages.view(-1, message.numel()), out.view(-1, n), wire, self.scheme.block_size)
        call.release(message)
        call.release(messages)

    def reduce_scatter(self, call: Call, full: torch.Tensor, inner: str, outer: str, name: str) -> Reduction:
        """This rank's shard of `outer`, summed over the ranks of `outer`, from their shards of `inner`.

        full: 1D, in the reduce dtype, counted as a buffer, overwritten by a flat reduction; freed once it is
              sent if no caller refers to it
        Returns a 1D tensor of full.numel() / (size of outer / size of inner) elements, same dtype, counted
        as a buffer.
        """
        wire, dtype = self.scheme.wire(name), full.dtype
        hops = self._hops(inner, outer, "reduce", is_plain(wire, dtype))
        if hops and not is_plain(wire, dtype):
            yield hops[0].hop.level, [full]
            rows = full.view(hops[0].hop.count, -1)
            del full
            messages, n = call.hold(encode(rows, wire, self.scheme.block_size)), rows.shape[1]
            call.release(rows)
            del rows
            for bound, following in zip_longest(hops, hops[1:]):
                received = exchange(call, messages, bound, name, wire)
                del messages
                if following is None:
                    return self._decode_sum(call, received, n, dtype, wire)
                parts = following.hop.count
                messages = call.hold(sum_encode(received, n, parts, dtype, wire, self.scheme.block_size))
                call.release(received)
                del received
                n //= parts
                yield following.hop.level, [messages]
        for bound in hops:
            yield bound.hop.level, [full]
            rows = full.view(bound.hop.count, -1)
            del full
            if bound.back is not None and bound.is_ring:
                full = call.hold(torch.empty_like(rows[0]))
                sum_around([rows[place] for place in bound.places], full, bound, call.name(name))
                call.release(rows)
                count_bytes(call, bound, name, "native", (bound.hop.count - 1) * full.nbytes)
            elif bound.back is not None:
                full = call.hold(add_partners(call, rows, bound, name).clone())
                call.release(rows)
            else:
                if bound.reorders is not None:
                    ordered = call.hold(in_rank_order(rows, bound.reorders).contiguous())
                    call.release(rows)
                    rows = ordered.view(rows.shape)
                    del ordered
                full = reduce_by_back_end(call, rows, bound, name)
        return full

    def swap(
        self,
        call: Call,
        mine: torch.Tensor,
        row: Collective,
        partners: Callable[[int], tuple[int, int]],
    ) -> Reduction:
        """Another rank's shard of the row's inner level, like `mine`, counted as a buffer.

        mine:     1D, this rank's shard, counted as a buffer
        partners: from this rank's place among those of the level to that of whom it sends to, and of whom it
                  receives from
        """
        wire = self.scheme.wire(row.name)
        is_encoded = not is_plain(wire, mine.dtype)
        hops = self._hops(*self.scheme.span(row), row.kind, not is_encoded)
        if not hops:
            return call.hold(mine.clone())
        [bound] = hops
        yield bound.hop.level, [mine]
        message = call.hold(encode(mine.view(1, -1), wire, self.scheme.block_size)[0]) if is_encoded else mine
        received = call.hold(torch.empty_like(message))
        bound.swap(message, received, partners(bound.coordinate), call.name(row.name))
        count_bytes(call, bound, row.name, wire if is_encoded else "native", message.nbytes)
        if not is_encoded:
            return received
        call.release(message)
        del message
        theirs = call.hold(torch.empty_like(mine))
        decode(received.view(1, -1), theirs.view(1, -1), wire, self.scheme.block_size)
        call.release(received)
        return theirs

    def _gather_sums(self, call: Call, shard: torch.Tensor, inner: str, outer: str, name: str) -> Reduction:
        """The second half of an all-reduce: `inner`'s shard, 1D, from those of `outer`. Both are counted as
        buffers."""
        hops = self.axis.levels.hops(inner, outer)
        if not hops:
            return shard
        out = call.hold(shard.new_empty(shard.numel() * prod(hop.count for hop in hops)))
        yield from self.gather(call, shard, out, inner, outer, name, kind="all_reduce")
        call.release(shard)
        return out

    def _decode_sum(
        self, call: Call, received: torch.Tensor, n: int, dtype: torch.dtype, wire: Wire
    ) -> torch.Tensor:
        """The sum of encoded messages of n values, 1D in `dtype`, in the order of the partners."""
        total = call.hold(torch.empty(n, dtype=torch.float32, device=received.device))
        decode_sum(received, total, wire, self.scheme.block_size)
        if dtype != torch.float32:
            call.release(total)
            total = call.hold(total.to(dtype))
        call.release(received)
        return total
