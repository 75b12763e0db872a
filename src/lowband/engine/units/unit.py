"""One unit: the parameters that are gathered together, their shards and their transitions.

What the module computes with: units.leaves.

[Note: shards] Outside of forward and backward the module's parameters are this rank's fp32 optimizer
shards: one 1D parameter per original parameter (empty where this rank holds nothing of it). All are views
into `master`, and each includes the padding behind it: zeros, whose gradients are zero. Any optimizer that
works element by element works on them.

[Note: stale] When the shards have changed (units.changes), the next gather first moves the new weights from
the optimizer's level to the weights' level.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from lowband.cost.memory import keeps_secondary, keeps_weights_copy
from lowband.engine.collectives.collectives import Collectives
from lowband.engine.transport.call import Call
from lowband.engine.transport.lane import Handle, Work
from lowband.engine.units.changes import Changes, mark_replaced
from lowband.engine.units.gradients import Gradients
from lowband.engine.units.initial import Initial
from lowband.engine.units.leaves import Leaves, Slot, outside_of_modes, put
from lowband.engine.units.shard_of import ShardOf
from lowband.engine.units.shard_parameter import ShardParameter
from lowband.engine.units.slice_of import is_partial, slice_of
from lowband.engine.units.states import UnitState
from lowband.engine.units.tied_to import tied_to
from lowband.errors import UserError
from lowband.spec.mesh import SELF
from lowband.spec.partition import UnitLayout, intersect, shard_range, shard_ranks
from lowband.spec.step import BACKWARD_GATHER, FORWARD_GATHER, UPDATE_GATHER


class Unit:
    """Parameters that are gathered together, and this rank's shards of them."""

    def __init__(
        self,
        name: str,
        slots: list[list[Slot]],
        names: list[str],
        collectives: Collectives,
        initial: Initial,
        unit_of: dict[int, "Unit"],
    ) -> None:
        """Take over the parameters at `slots`: per parameter, all places where it is registered.

        names:   the parameters' names in the sharded module
        initial: the parameters' values
        unit_of: where each unit is found by the storage of its gathered weights, see passes.saved_leaves
        """
        self.name, self.slots = name, slots
        self.collectives, self.scheme, self.meter = collectives, collectives.scheme, collectives.meter
        self.levels, self.rank = collectives.axis.levels, collectives.axis.rank
        self.compute_dtype = collectives.options.compute_dtype

        originals = [getattr(*places[0]) for places in slots]
        self.requires_grad = originals[0].requires_grad
        self.tied = tied_to(originals[0])  # then it is the unit's only one
        of = slice_of(originals[0])
        # Its gradients are sums over these ranks already: tokens of all of them came here.
        self.expert_ranks = of.ranks if of is not None and of.axis == "expert" else 1
        self.layout = UnitLayout.of([tuple(p.shape) for p in originals], self.levels.world)
        self._hold_shards(originals, names)
        self._take_values(originals, names, initial)
        self._unit_of = unit_of
        self._held = self._new_leaves(originals)
        self.leaves = self._held.leaves
        self._shown: Sequence[torch.Tensor] = self.leaves  # what the module has or had while it is whole
        self._is_put = False  # whether the module has them
        self._arriving: torch.Tensor | None = None  # the buffer that a gather fills
        self.state = UnitState.GATHERED if self.is_whole else UnitState.SHARDED
        self._gathering: Handle | None = None
        self._secondary_version: int | None = None  # version of the weights in the secondary shard
        self.grads = Gradients(self.leaves, self.shards, self.layout, self.optim_range, self.meter)
        self.partial_ranges = self._partial_ranges(originals)
        self._put(self.shards, instead_of=originals)
        for original, (module, attribute) in zip(originals, (places[0] for places in slots), strict=True):
            mark_replaced(original, f"{name}: {type(module).__name__}.{attribute}")

    # ---- this rank's shards

    def range_of(self, level: str) -> tuple[int, int]:
        """This rank's range of the unit's elements over `level`, as (start, stop)."""
        return shard_range(self.layout.numel, self.levels, level, self.rank)

    @property
    def optim_range(self) -> tuple[int, int]:
        """The range of the unit's elements that `master` covers, as (start, stop)."""
        return self.range_of(self.scheme.optim)

    def _partial_ranges(self, originals: list[nn.Parameter]) -> list[tuple[int, int]]:
        """Of this rank's gradients, as (start, stop), those that are partial sums."""
        start, stop = self.optim_range
        places = zip(self.layout.ranges(), originals, strict=True)
        found = [intersect(place, (start, stop)) for place, original in places if is_partial(original)]
        return [(a - start, b - start) for a, b in found if a < b]

    def _shard(self, kind: str, level: str, dtype: torch.dtype) -> torch.Tensor:
        """Zeros for this rank's shard over `level`, 1D."""
        start, stop = self.range_of(level)
        return self.meter.hold(kind, torch.zeros(stop - start, dtype=dtype, device=self.collectives.device))

    def _hold_shards(self, originals: list[nn.Parameter], names: list[str]) -> None:
        start, stop = self.optim_range
        self.master = self._shard("optim", self.scheme.optim, torch.float32)
        self.shards: list[nn.Parameter] = []
        ranks = tuple(shard_ranks(self.levels, self.scheme.optim, self.rank))
        places = zip(self.layout.spans(), self.layout.ranges(), originals, names, strict=True)
        for span, place, original, name in places:
            a, b = intersect(span, (start, stop))
            shard = ShardParameter(self.master[a - start : b - start], self.requires_grad)
            first, last = (min(i, place[1]) - place[0] for i in intersect(place, (start, stop)))
            shard.shard_of = ShardOf(name, original.shape, first, last, ranks, slice_of(original))
            shard.collectives = self.collectives
            self.shards.append(shard)
        self.changes = Changes(self.name, self.master, self.shards)

        # Whether each rank always holds the whole unit, so that computing needs no gather.
        self.is_whole = not self.levels.hops(SELF, self.scheme.weights)
        self.weights: torch.Tensor | None = None  # shard of `weights`, compute dtype
        if keeps_weights_copy(self.scheme, self.levels, self.compute_dtype == torch.float32):
            self.weights = self._shard("weights", self.scheme.weights, self.compute_dtype)
        self.secondary: torch.Tensor | None = None  # shard of `secondary`, compute dtype
        if keeps_secondary(self.scheme, self.levels):
            self.secondary = self._shard("secondary", self.scheme.backward_level, self.compute_dtype)

    def _take_values(self, originals: list[nn.Parameter], names: list[str], initial: Initial) -> None:
        """Copy this rank's part of the initial values into its shards."""
        shards = [(self.optim_range, self.master)]
        if self.weights is not None:
            shards.append((self.range_of(self.scheme.weights), self.weights))
        for original, name, place in zip(originals, names, self.layout.ranges(), strict=True):
            parts = [(intersect(place, held), held[0], shard) for held, shard in shards]
            if all(a == b for (a, b), _, _ in parts):
                continue
            with initial.values(name, original) as values, torch.no_grad():
                for (a, b), start, shard in parts:
                    shard[a - start : b - start] = values[a - place[0] : b - place[0]]
        self.gathered_version = self.changes.version  # of the weights that were gathered last
        if self.weights is not None:
            self.changes.take_sample()

    def _new_leaves(self, originals: list[nn.Parameter]) -> Leaves:
        """Leaves without memory if the unit is to be gathered. See units.leaves, [Note: leaves]."""
        if self.is_whole:
            flat = self.master if self.weights is None else self.weights
        else:
            flat = self.master.new_empty(self.layout.numel, dtype=self.compute_dtype)
        leaves = Leaves(self.name, originals, self.layout, flat)
        self._unit_of[flat.untyped_storage()._cdata] = self
        if not self.is_whole:
            self.meter.hold("start", flat)
            self.meter.release("start", flat.nbytes)
            flat.untyped_storage().resize_(0)
        return leaves

    def _compute_with(self, gathered: torch.Tensor | None) -> None:
        """Let the leaves be views into a gathered buffer, or have no memory."""
        self._unit_of.pop(self.flat.untyped_storage()._cdata, None)
        if gathered is None:
            self._held.empty()
        else:
            self._held.fill(gathered)
        self._unit_of[self.flat.untyped_storage()._cdata] = self

    def put_shards(self) -> None:
        """Register this rank's shards in the module. See [Note: shards]."""
        self._put(self.shards, instead_of=self._shown)
        self._is_put = False
        self._shown = self.leaves  # DTensors would keep the gathered buffer

    def put_leaves(self) -> None:
        """Register the whole parameters in the module; new DTensors, where it sees them so."""
        if self._held.are_dtensors():
            self.put_shards()
            self._shown = self._held.shown()
        self._is_put = True
        self._put(self._shown, instead_of=self.shards)

    def _put(self, parameters: Sequence[torch.Tensor], instead_of: Sequence[torch.Tensor]) -> None:
        put(parameters, instead_of, self.slots, self.name)

    # ---- weights: gather and drop

    @property
    def flat(self) -> torch.Tensor:
        """The buffer that the leaves are views of."""
        return self._held.flat

    def check_version(self, version: int) -> None:
        """Raises UserError if the weights are not those that a forward computed with any more."""
        if self.changes.version != version:
            raise UserError(
                f"weights of '{self.name}' changed between this forward and its backward",
                allowed="the optimizer's step after the backward of every forward",
            )

    def start_gather(self, backward: bool) -> None:
        """Submit the gather of the whole unit, unless it is already gathered or being gathered.

        Raises UserError if the shards were replaced, moved, cast, frozen, or written through `.data`.
        """
        if self.is_whole and backward:  # its forward has looked
            return
        version = self.changes.version
        stale = version != self.gathered_version
        self.changes.check_shards()
        if self.is_whole:
            self._refresh_whole(stale)
            self.gathered_version = version
            return
        if stale:  # there was an optimizer step between a forward without a backward and this one
            self.drop()
        if self.state is not UnitState.SHARDED:
            return
        self._check_copy(stale)
        from_secondary = backward and self.secondary is not None and self._secondary_version == version
        levels = self._levels_of_gather(stale, from_secondary)
        with outside_of_modes():
            self._arriving = self.meter.hold("gathered", torch.empty_like(self.flat))
        self.state = UnitState.GATHERING
        try:
            self._gathering = self.collectives.submit(
                self.name,
                levels,
                partial(
                    self._gather,
                    into=self._arriving,
                    stale=stale,
                    backward=backward,
                    from_secondary=from_secondary,
                ),
            )
        except BaseException:
            self._free()
            raise
        self.gathered_version = version

    def finish_gather(self) -> None:
        """Wait for the gather and register the whole parameters in the module."""
        if self._gathering is not None:
            gathering, self._gathering = self._gathering, None
            try:
                gathering.wait()
            except BaseException:
                self._free()
                raise
        if self._arriving is not None:
            gathered, self._arriving = self._arriving, None
            self._compute_with(gathered)
        self.state = UnitState.GATHERED
        self.put_leaves()

    def keep_secondary(self) -> None:
        """Copy this rank's part of the gathered unit into the secondary shard."""
        if self.secondary is not None and self.state is UnitState.GATHERED:
            start, stop = self.range_of(self.scheme.backward_level)
            self.secondary.copy_(self.flat[start:stop])
            self._secondary_version = self.gathered_version

    def drop(self) -> None:
        """Register the shards again, and free the unit's buffer unless it is held all the time."""
        if self._gathering is not None:  # prefetched but not used
            self.finish_gather()
        if self._is_put:
            self.put_shards()
        if self.state is UnitState.GATHERED and (not self.is_whole or self.weights is not None):
            is_changed = self._held.are_changed()
            self._free()
            if self.is_whole and is_changed:  # the next gather fetches the weights anew
                self.gathered_version = -1
            if is_changed:
                raise UserError(
                    "weights were changed in place in a forward, and the changes are dropped with them",
                    where=f"unit '{self.name}'",
                    allowed="buffers for what a forward changes; parameters changed outside of it",
                )

    def _free(self) -> None:
        """Free the gathered parameters, if they are not held all the time."""
        if not self.is_whole and self.state is not UnitState.SHARDED:
            self.meter.release("gathered", self.flat.nbytes)
            self._arriving = None
            self._compute_with(None)
            self.state = UnitState.SHARDED

    def _check_copy(self, stale: bool) -> None:
        """Before the copy of the weights is used, check for changes that no version counter shows."""
        if self.weights is None:
            return
        if stale:
            self.changes.take_sample()
        else:
            self.changes.check_sample()

    def _refresh_whole(self, stale: bool) -> None:
        self._check_copy(stale)
        if stale and self.weights is not None:
            self._held.forget_changes()
            levels = self.collectives.inwards(self.scheme.weights, self.scheme.optim)
            self._gathering = self.collectives.submit(self.name, levels, self._refresh)

    def _levels_of_gather(self, stale: bool, from_secondary: bool) -> list[str]:
        inwards = self.collectives.inwards
        if from_secondary:
            return inwards(SELF, self.scheme.backward_level)
        refreshed = stale and self.weights is not None
        first = inwards(self.scheme.weights, self.scheme.optim) if refreshed else []
        return [*first, *inwards(SELF, self.scheme.weights)]

    def _gather(
        self, call: Call, into: torch.Tensor, stale: bool, backward: bool, from_secondary: bool
    ) -> Work:
        source, level = (self.secondary, self.scheme.backward_level) if from_secondary else (None, "")
        if source is None:
            if stale:
                yield from self._refresh(call)
            # Without a copy of the weights, the master shard itself is gathered.
            source, level = (self.master if self.weights is None else self.weights), self.scheme.weights
        row = BACKWARD_GATHER if backward else FORWARD_GATHER
        yield from self.collectives.gather(call, source, into, SELF, level, row.name)

    def _refresh(self, call: Call) -> Work:
        """Gather the master weights from the optimizer's level to the weights' level. [Note: stale]"""
        if self.weights is not None:
            weights, optim = self.scheme.weights, self.scheme.optim
            yield from self.collectives.gather(
                call, self.master, self.weights, weights, optim, UPDATE_GATHER.name
            )
