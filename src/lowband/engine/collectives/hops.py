"""One hop of a collective: messages between partners on the links of one level, counted.

Where hops are one (a ring, or joined), it is a single hop between all their partners.
"""

from collections.abc import Generator, Sequence

import torch
import torch.distributed as dist

from lowband.engine.collectives.parts import range_of, sum_rows
from lowband.engine.collectives.ring import gather_around, in_rank_order
from lowband.engine.transport.axis import BoundHop
from lowband.engine.transport.call import Call
from lowband.spec.partition import pieces
from lowband.spec.wire import Wire

# torch 2.13 renamed these and deprecates the old names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


Moves = Generator[tuple[str, Sequence[torch.Tensor]], None, None]  # see transport.lane.Work


def place_shard(shard: torch.Tensor, out: torch.Tensor, hops: list[BoundHop]) -> None:
    """Copy this rank's shard to where `gather_hops` expects it."""
    start, length = range_of(out, hops)
    out[start : start + length] = shard


def gather_hops(call: Call, out: torch.Tensor, hops: list[BoundHop], name: str, wire: Wire) -> Moves:
    """Fill `out`, which has this rank's shard, unencoded or encoded; starts in the first hop's lane."""
    start, length = range_of(out, hops)
    for i, bound in enumerate(reversed(hops)):
        if i > 0:
            yield bound.hop.level, [out]
        count = bound.hop.count
        first = start - bound.place * length
        _gather_hop(call, out[first : first + count * length].view(count, length), bound, name)
        count_bytes(call, bound, name, wire, (count - 1) * length * out.element_size())
        start, length = first, count * length


def _gather_hop(call: Call, parts: torch.Tensor, bound: BoundHop, name: str) -> None:
    """Fill `parts`, [partners, length], of which this rank has its own."""
    mine = parts[bound.place]
    if bound.back is not None:
        by_partner = [parts[place] for place in bound.places]
        if bound.is_ring:
            gather_around(by_partner, bound, call.name(name))
        else:
            bound.exchange([mine] * bound.hop.count, by_partner, call.name(name))
    elif bound.reorders is not None:
        ordered = in_rank_order(parts, bound.reorders)
        gathered = call.hold(parts.new_empty(ordered.shape))
        all_gather(gathered.view(-1), mine, group=bound.group)
        ordered.copy_(gathered)
        call.release(gathered)
    else:
        all_gather(parts.view(-1), mine, group=bound.group)


def all_to_all(call: Call, messages: torch.Tensor, bound: BoundHop, name: str) -> torch.Tensor:
    """One message to each partner of a hop, and one from each: [partners, length].

    In the hop's lane. messages: [partners, length], counted as a buffer
    """
    received = exchange(call, messages, bound, name, "native")
    call.release(received)
    return received


def reduce_by_back_end(call: Call, rows: torch.Tensor, bound: BoundHop, name: str) -> torch.Tensor:
    """One hop by the back end's own reduce-scatter."""
    out = call.hold(torch.empty_like(rows[0]))
    reduce_scatter(out, rows.view(-1), group=bound.group)
    call.release(rows)
    count_bytes(call, bound, name, "native", (bound.hop.count - 1) * out.nbytes)
    return out


def count_bytes(call: Call, bound: BoundHop, name: str, wire: Wire, sent_bytes: int) -> None:
    """Count a hop's bytes; where it is several, on the levels whose links they take."""
    if bound.joined is None:
        call.ledger.add(bound.hop.level, name, wire, sent_bytes)
        return
    for level, share in bound.shares.items():  # also 0 bytes, so that all ranks count under the same keys
        call.ledger.add(level, name, wire, int(sent_bytes * share))


def exchange(call: Call, messages: torch.Tensor, bound: BoundHop, name: str, wire: Wire) -> torch.Tensor:
    """Send one message to each partner and return one from each: [partners, message length]."""
    received = call.hold(torch.empty_like(messages))
    if bound.back is not None:
        received[bound.place] = messages[bound.place]
        sent, into = ([rows[place] for place in bound.places] for rows in (messages, received))
        bound.exchange(sent, into, call.name(name))
    else:
        dist.all_to_all_single(received, messages, group=bound.group)
    call.release(messages)
    count_bytes(call, bound, name, wire, (bound.hop.count - 1) * messages[0].nbytes)
    return received


def add_partners(call: Call, rows: torch.Tensor, bound: BoundHop, name: str) -> torch.Tensor:
    """Exchange rows, [partners, n]; leaves the sum of all partners' in this rank's row and returns it.

    Piece by piece, so that little is held besides the rows (spec.partition.pieces).
    gloo's own reduce-scatter is an all-reduce, which sends twice the bytes of this exchange.
    """
    own, hops = rows[bound.place], [bound.hop] if bound.joined is None else bound.joined.hops
    count = len(rows)
    cuts = pieces(own.numel(), count - 1)
    theirs = call.hold(rows.new_empty(count - 1, cuts[0][1]))
    for start, stop in cuts:
        free = iter(theirs[:, : stop - start])
        into = [own[start:stop] if place == bound.place else next(free) for place in range(count)]
        received = [into[place] for place in bound.places]
        bound.exchange([rows[place, start:stop] for place in bound.places], received, call.name(name))
        sum_rows(into, hops, out=own[start:stop])
    count_bytes(call, bound, name, "native", (count - 1) * own.nbytes)
    call.release(theirs)
    return own
