"""Bytes of gradients in flight and of collectives' send and receive buffers, per rank, in closed form.

Gradients move by bucket (spec.buckets), all else by unit. Only the largest collective is counted. Those of
different levels may overlap, and while a bucket is reduced the next one fills; how many do depends on timing.
A reduction starts with the bucket's whole gradient. At a hop among n partners

    native     (NCCL, RCCL) holds its input and 1/n of it
    exchange   (gloo) holds its input and a piece of what the n - 1 partners send (spec.partition.pieces);
               an all-reduce is in place
    encoded    (every wire that is not plain) holds its input and the encoded messages; then its messages
               sent and received, of equal size; then those received and 1/n of the input, summed in fp32
               and cast to the reduce dtype

Of a tier, a fetch holds this rank's shard of the weights on the device while it is gathered; a stash the
gradients. So does what `update_gather` makes of weights that lie beyond the device. In host memory:
cost/memory.py.

A swap holds what it sends and what it receives, and what is encoded besides. A gather on an encoded wire
holds its own message and all it receives; on a plain wire it has no buffer.

In a flat ring over n ranks a reduction holds, on every back end, its input and 1/n of it. Joined hops hold
what one hop does. Back ends that gather and scatter by themselves do so in rank order, which is not the order
of the shards if several hops are one: then a reduction also holds its input twice, and a gather all that it
receives once more.
"""

from collections.abc import Sequence

from lowband.spec.buckets import buckets
from lowband.spec.mesh import Levels
from lowband.spec.partition import pieces
from lowband.spec.scheme import Scheme
from lowband.spec.step import BACKWARD_GATHER, FORWARD_GATHER, UPDATE_GATHER, Collective, Pattern, pattern_of
from lowband.spec.tiers import DEVICE
from lowband.spec.wire import DTYPE_BYTES, Wire, is_plain, message_bytes

SUM_BYTES = 4  # sums of decoded values are fp32


def buffer_bytes(
    unit_numels: Sequence[int],
    scheme: Scheme,
    levels: Levels,
    compute_dtype: str,
    reduce_dtype: str,
    backend: str,
    pattern: Pattern = "hops",
) -> int:
    """Peak bytes per rank, excluding the temporaries of encoding and decoding one piece.

    unit_numels: elements per unit, padding included, the root's first; of units whose states are all in one
                 place
    backend:     torch.distributed's backend
    pattern:     how collectives run
    """
    peak = 0
    is_stashed = scheme.update_tier != DEVICE
    fetched = [FORWARD_GATHER, UPDATE_GATHER]
    if not levels.hops(scheme.backward_level, scheme.weights):  # else from the secondary shard
        fetched.append(BACKWARD_GATHER)
    bucket_numels = [sum(each) for each in by_bucket(unit_numels, scheme, levels, reduce_dtype)]
    for row in scheme.rows:
        dtype = row.dtype(compute_dtype, reduce_dtype)
        for numel in set(bucket_numels if row.carries == "gradients" else unit_numels):  # blocks are alike
            unit = _UnitBuffers(scheme, levels, numel, backend, pattern)
            if row.kind == "swap":
                peak = max(peak, unit.swap(row, dtype))
                continue
            gathered = unit.gather(row, dtype) if row.kind == "gather" else unit.reduce(row, dtype)
            back = unit.gather_back(row, dtype) if row.kind == "all_reduce" else 0
            if is_stashed and row is UPDATE_GATHER:
                gathered += DTYPE_BYTES[compute_dtype] * numel // levels.size(scheme.optim)
            if scheme.weights_tier != DEVICE and row in fetched:
                gathered += DTYPE_BYTES[compute_dtype] * numel // levels.size(scheme.weights)
            peak = max(peak, gathered, back)
    if is_stashed:
        peak = max(peak, SUM_BYTES * max(bucket_numels) // levels.size(scheme.optim))
    return peak


def by_bucket(
    unit_numels: Sequence[int], scheme: Scheme, levels: Levels, reduce_dtype: str
) -> list[list[int]]:
    """Elements per unit, by bucket. unit_numels: the root's first; its gradients are ready last"""
    ordered = [*unit_numels[:0:-1], unit_numels[0]]
    return [[ordered[i] for i in each] for each in buckets(ordered, scheme, levels, reduce_dtype)]


class _UnitBuffers:
    """Peaks of the collectives of one unit, or one bucket, in bytes."""

    def __init__(self, scheme: Scheme, levels: Levels, numel: int, backend: str, pattern: Pattern) -> None:
        self._scheme, self._levels, self._numel, self._backend = scheme, levels, numel, backend
        self._pattern = pattern

    def gather(self, row: Collective, dtype: str) -> int:
        wire, (inner, outer) = self._scheme.wire(row.name), self._scheme.span(row)
        message = self._message(self._numel // self._levels.size(outer), wire, dtype)
        received = message * (self._levels.size(outer) // self._levels.size(inner))
        held = received if self._reorders(row, dtype) else 0
        if self._levels.hops(inner, outer) and not is_plain(wire, dtype):
            held += message + received
        return held

    def gather_back(self, row: Collective, dtype: str) -> int:
        """The gather half of an all-reduce, including its input and its result; 0 if it is in place."""
        inner, outer = self._scheme.span(row)
        is_exchange = self._backend == "gloo" and self._runs_as(row, dtype) != "flat"
        is_in_place = is_exchange and is_plain(self._scheme.wire(row.name), dtype)
        if is_in_place or not self._levels.hops(inner, outer):
            return 0
        numels = sum(self._numel // self._levels.size(level) for level in (inner, outer))
        return DTYPE_BYTES[dtype] * numels + self.gather(row, dtype)

    def reduce(self, row: Collective, dtype: str) -> int:
        wire, (inner, outer) = self._scheme.wire(row.name), self._scheme.span(row)
        size = DTYPE_BYTES[dtype]
        numel = self._numel // self._levels.size(inner)
        peak = size * numel * (2 if self._reorders(row, dtype) else 1)
        pattern = self._runs_as(row, dtype)
        joined = None if pattern == "hops" else self._levels.joined(inner, outer)
        for hop in self._levels.hops(inner, outer) if joined is None else [joined.hop]:
            part, given = numel // hop.count, size * numel
            if is_plain(wire, dtype) and (self._backend != "gloo" or pattern == "flat"):
                stages = [given + size * part]
            elif is_plain(wire, dtype):
                _, piece = pieces(part, hop.count - 1)[0]
                stages = [given + size * (hop.count - 1) * piece]
            else:
                sent = hop.count * self._message(part, wire, dtype)
                stages = [given + sent, sent + sent, sent + SUM_BYTES * part]
            peak = max(peak, *stages)
            numel = part
        return peak

    def swap(self, row: Collective, dtype: str) -> int:
        """What is sent and what is received, and on an encoded wire their values besides."""
        wire, (inner, outer) = self._scheme.wire(row.name), self._scheme.span(row)
        numel = self._numel // self._levels.size(inner)
        if is_plain(wire, dtype) or not self._levels.hops(inner, outer):
            return 2 * DTYPE_BYTES[dtype] * numel
        message = self._message(numel, wire, dtype)
        return DTYPE_BYTES[dtype] * numel + max(2 * message, message + DTYPE_BYTES[dtype] * numel)

    def _runs_as(self, row: Collective, dtype: str) -> Pattern:
        return pattern_of(self._pattern, row.kind, is_plain(self._scheme.wire(row.name), dtype))

    def _reorders(self, row: Collective, dtype: str) -> bool:
        """Whether the back end's order of ranks is not that of the shards."""
        hops = self._levels.hops(*self._scheme.span(row))
        return self._backend != "gloo" and self._runs_as(row, dtype) != "hops" and len(hops) > 1

    def _message(self, numel: int, wire: Wire, dtype: str) -> int:
        return message_bytes(numel, wire, dtype, self._scheme.block_size)
