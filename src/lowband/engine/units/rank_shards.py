"""This rank's shards of one unit, and how a gather fills the whole unit from them.

[Note: shards] Outside of forward and backward the module's parameters are this rank's fp32 optimizer
shards: one 1D parameter per original parameter (empty where this rank holds nothing of it). All are views
into `master`, and each includes the padding behind it: zeros, whose gradients are zero. Any optimizer that
works element by element works on them. What is written there, as 0/0 by an Adam whose eps is 0 or as noise by
a user, is zeros again before a wire reads it, which may have it in a block with weights.

[Note: stale] When the shards have changed (units.changes), the next gather first moves the new weights from
the optimizer's level to the weights' level.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from lowband.cost.memory import (
    STATE_BYTES,
    are_gathered,
    keeps_secondary,
    keeps_weights_copy,
)
from lowband.engine.collectives.collectives import Collectives
from lowband.engine.collectives.copies import CPU, fetch
from lowband.engine.transport.call import Call
from lowband.engine.transport.lane import Work
from lowband.engine.units.absent import Lies
from lowband.engine.units.initial import Initial
from lowband.engine.units.late import Late
from lowband.engine.units.leaves import outside_of_modes
from lowband.engine.units.on_disk import OnDisk
from lowband.engine.units.own_attributes import keep_attributes
from lowband.engine.units.shard_of import ShardOf
from lowband.engine.units.shard_parameter import ShardParameter, note_master
from lowband.engine.units.slice_of import is_alike, is_partial, slice_of
from lowband.engine.units.to_and_fro import HostStates, ToAndFro
from lowband.engine.units.weights_beyond import WeightsBeyond
from lowband.errors import UserError
from lowband.spec.mesh import SELF
from lowband.spec.partition import UnitLayout, intersect, shard_range, shard_ranks
from lowband.spec.step import (
    BACKWARD_FETCH,
    BACKWARD_GATHER,
    FORWARD_FETCH,
    FORWARD_GATHER,
    UPDATE_GATHER,
    Collective,
)
from lowband.spec.tiers import DEVICE, DISK, HOST, at


class RankShards:
    """A rank's shards of one unit.

    master:         1D, fp32, over `optim`, in the optimizer's tier
    parameters:     the optimizer's, views into it
    weights:        1D, in the compute dtype, over `weights`; None where `master` serves, or `beyond`
    beyond:         the same in another tier than the device; or None
    secondary:      1D, in the compute dtype, over the backward's level; None without one
    disk:           where `master` is but while it is used, a disk or host memory, or who updates it late; or
                    None
    is_whole:       whether each rank always holds the whole unit, so that computing needs no gather
    partial_ranges: of this rank's gradients, as (start, stop), those that are partial sums
    alike_ranges:   with names, those that are to be the same on all tensor ranks
    """

    def __init__(
        self,
        layout: UnitLayout,
        collectives: Collectives,
        originals: Sequence[nn.Parameter],
        names: Sequence[str],
        initial: Initial,
        unit: str,
    ) -> None:
        """originals, names: the whole parameters, and their names in the sharded module
        unit: its name
        initial: their values
        """
        self._layout, self._collectives, self._scheme = layout, collectives, collectives.scheme
        self._levels, self._rank = collectives.axis.levels, collectives.axis.rank
        scheme, levels, compute_dtype = self._scheme, self._levels, collectives.options.compute_dtype
        tier, device = scheme.optim_tier, collectives.device
        where = device if scheme.update_tier == DEVICE else CPU
        self.master = self._zeros(at("optim", tier), scheme.optim, torch.float32, where)
        note_master(self.master, self)
        self.parameters = self._parameters(originals, names)
        ranges = [*self._ranges(originals, names)]
        self.partial_ranges = [(start, stop) for of, _, start, stop in ranges if is_partial(of)]
        bounds = [0, *(place for of, _, *ends in ranges for place in ends), len(self.master)]
        self._padding = [(a, b) for a, b in zip(bounds[::2], bounds[1::2], strict=True) if a < b]
        self.alike_ranges = [(name, start, stop) for of, name, start, stop in ranges if is_alike(of)]
        self.is_whole = not are_gathered(scheme, levels)
        self.weights: torch.Tensor | None = None
        self.beyond: WeightsBeyond | None = None
        if scheme.weights_tier != DEVICE:
            start, stop = self.range_of(scheme.weights)
            self.beyond = WeightsBeyond(unit, stop - start, collectives)
        elif keeps_weights_copy(scheme, levels, compute_dtype == torch.float32):
            self.weights = self._zeros("weights", scheme.weights, compute_dtype, device)
        self.secondary: torch.Tensor | None = None
        if keeps_secondary(scheme, levels):
            self.secondary = self._zeros("secondary", scheme.backward_level, compute_dtype, device)
        self._take_values(originals, names, initial)
        if self.beyond is not None:
            self.beyond.settle()
        self.disk: OnDisk | None = None
        if scheme.is_moved:
            self.disk = self._to_and_fro()
        elif scheme.is_late:
            self.disk = Late(self.master, self._rounded(), collectives.meter)
        elif tier == DISK:
            self.disk = self._on_disk(unit)
        if self.disk is not None:
            self.disk.start_write(None, (), is_counted=False)
            self.disk.wait()
            for shard in self.parameters:
                shard.on_disk = Lies(self.disk, shard.shard_of.name)

    def _to_and_fro(self) -> OnDisk:
        """Have the host keep the states, from now on."""
        new = self.weights
        assert new is not None
        if self._levels.hops(self._scheme.weights, self._scheme.optim):
            new = self._zeros("weights", self._scheme.optim, new.dtype, new.device)
        return ToAndFro(self.master, new, HostStates(), self._collectives)

    def _on_disk(self, unit: str) -> OnDisk:
        """Have the disk keep the states, from now on."""
        disk = self._collectives.options.disk
        if disk is None:
            raise UserError(
                f"optim {self._scheme.optim}@{DISK}, and no folder",
                where=f"scheme '{self._scheme.name}'",
                allowed="lowband.shard(..., disk=folder)",
            )
        states = self.master.numel() * STATE_BYTES
        return OnDisk(self.master, self._rounded(), disk.file(unit, states), self._collectives)

    def _rounded(self) -> torch.Tensor:
        """Host memory for new weights in the compute dtype."""
        dtype = self._collectives.options.compute_dtype
        return self._zeros(at("weights", HOST), self._scheme.optim, dtype, CPU)

    def range_of(self, level: str) -> tuple[int, int]:
        """This rank's range of the unit's elements over `level`, as (start, stop)."""
        return shard_range(self._layout.numel, self._levels, level, self._rank)

    # ---- made once

    def _zeros(self, kind: str, level: str, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Zeros for this rank's shard over `level`, 1D."""
        start, stop = self.range_of(level)
        zeros = torch.zeros(stop - start, dtype=dtype, device=device)
        return self._collectives.meter.hold(kind, zeros)

    def _parameters(self, originals: Sequence[nn.Parameter], names: Sequence[str]) -> list[ShardParameter]:
        start, stop = self.range_of(self._scheme.optim)
        ranks = tuple(shard_ranks(self._levels, self._scheme.optim, self._rank))
        places = zip(self._layout.spans(), self._layout.ranges(), originals, names, strict=True)
        made: list[ShardParameter] = []
        for span, place, original, name in places:
            a, b = intersect(span, (start, stop))
            shard = ShardParameter(self.master[a - start : b - start], original.requires_grad)
            keep_attributes(original, shard)
            first, last = (min(i, place[1]) - place[0] for i in intersect(place, (start, stop)))
            shard.shard_of = ShardOf(name, original.shape, first, last, ranks, slice_of(original))
            shard.collectives = self._collectives
            made.append(shard)
        return made

    def _ranges(
        self, originals: Sequence[nn.Parameter], names: Sequence[str]
    ) -> Iterator[tuple[nn.Parameter, str, int, int]]:
        """Parameters with their names, and this rank's range of each in `master`, if it has some of it."""
        start, stop = self.range_of(self._scheme.optim)
        for place, original, name in zip(self._layout.ranges(), originals, names, strict=True):
            a, b = intersect(place, (start, stop))
            if a < b:
                yield original, name, a - start, b - start

    def _take_values(self, originals: Sequence[nn.Parameter], names: Sequence[str], initial: Initial) -> None:
        """Copy this rank's part of the initial values into its shards."""
        shards = [(self.range_of(self._scheme.optim), self.master)]
        copy = self.weights if self.beyond is None else self.beyond.values
        if copy is not None:
            shards.append((self.range_of(self._scheme.weights), copy))
        for original, name, place in zip(originals, names, self._layout.ranges(), strict=True):
            parts = [(intersect(place, held), held[0], shard) for held, shard in shards]
            if all(a == b for (a, b), _, _ in parts):
                continue
            with initial.values(name, original) as values, torch.no_grad():
                for (a, b), start, shard in parts:
                    shard[a - start : b - start] = values[a - place[0] : b - place[0]]

    def clear_padding(self, values: torch.Tensor) -> None:
        """Make zeros of what was written behind parameters. values: `master`'s, or of the same elements

        That is no change of these: their version stays.
        """
        if self._padding:
            with outside_of_modes():
                torch._foreach_zero_([values.data[a:b] for a, b in self._padding])

    # ---- the whole unit

    def levels_of_gather(self, stale: bool, from_secondary: bool) -> list[str]:
        """The levels of the hops that `gather` makes, in order."""
        inwards = self._collectives.inwards
        if from_secondary:
            return inwards(SELF, self._scheme.backward_level)
        hops = inwards(SELF, self._scheme.weights)
        if stale:
            return [*self.levels_of_refresh(), *hops, *(self.beyond.outwards if self.beyond else ())]
        return [*(self.beyond.inwards if self.beyond else ()), *hops]

    def gather(
        self, call: Call, into: torch.Tensor, stale: bool, backward: bool, from_secondary: bool
    ) -> Work:
        """Fill `into`, the whole unit, 1D. stale: whether `master` has changed since the last time"""
        row = BACKWARD_GATHER if backward else FORWARD_GATHER
        source, level = (self.secondary, self._scheme.backward_level) if from_secondary else (None, "")
        if source is None and self.beyond is not None:
            yield from self._gather_beyond(call, self.beyond, into, stale, row)
            return
        if source is None:
            if stale:
                yield from self.refresh(call)
            # Without a copy of the weights, the master shard itself is gathered.
            source = self.master if self.weights is None else self.weights
            level = self._scheme.weights
        yield from self._collectives.gather(call, source, into, SELF, level, row.name)

    def _gather_beyond(
        self, call: Call, beyond: WeightsBeyond, into: torch.Tensor, stale: bool, row: Collective
    ) -> Work:
        """The same where the shard is on the device for this gather alone, unless it is one that stays."""
        is_buffer = True
        if stale:
            start, stop = self.range_of(self._scheme.weights)
            shard = call.hold(torch.empty(stop - start, dtype=into.dtype, device=into.device))
            yield from self._renew(call, shard)
        else:
            of = BACKWARD_FETCH if row is BACKWARD_GATHER else FORWARD_FETCH
            shard, is_buffer = yield from beyond.fetch(call, of)
        yield from self._collectives.gather(call, shard, into, SELF, self._scheme.weights, row.name)
        if stale:
            yield from beyond.stash(call, shard)
        if is_buffer:
            call.release(shard)

    def levels_of_refresh(self) -> list[str]:
        """The levels of the hops that `refresh` makes, in order."""
        scheme = self._scheme
        if self.weights is None and self.beyond is None:
            return []
        fetched = [] if scheme.update_tier == DEVICE else [scheme.update_tier]
        return [*fetched, *self._collectives.inwards(scheme.weights, scheme.optim)]

    def refresh(self, call: Call) -> Work:
        """Move the new weights to `weights`. [Note: stale]"""
        if self.weights is not None:
            yield from self._renew(call, self.weights)

    def _renew(self, call: Call, weights: torch.Tensor) -> Work:
        """Fetch the master weights to the device and gather them from the optimizer's level to the weights'
        level."""
        scheme, collectives = self._scheme, self._collectives
        new = self.master
        if self.disk is not None:
            self.disk.await_weights()
            new = self.disk.rounded
            self.clear_padding(new)
        is_fetched = scheme.update_tier != DEVICE
        if is_fetched:
            new = yield from fetch(call, new, weights.dtype, collectives.device)
        if new is weights:  # written where they are used
            return
        yield from collectives.gather(call, new, weights, scheme.weights, scheme.optim, UPDATE_GATHER.name)
        if is_fetched:
            call.release(new)

    def keep_secondary(self, whole: torch.Tensor) -> None:
        """Copy this rank's part of the gathered unit into the secondary shard, if there is one."""
        if self.secondary is not None:
            start, stop = self.range_of(self._scheme.backward_level)
            with outside_of_modes():
                self.secondary.copy_(whole[start:stop])
