"""One unit: the parameters that are gathered together, and their transitions.

What this rank holds of them: units.rank_shards. What the module computes with: units.leaves.
"""

from collections.abc import Sequence
from functools import partial
from typing import NoReturn

import torch
from torch import nn

from lowband.engine.collectives.collectives import Collectives
from lowband.engine.transport.lane import Handle
from lowband.engine.units.changes import Changes
from lowband.engine.units.gradients import Gradients
from lowband.engine.units.initial import Initial
from lowband.engine.units.leaves import Leaves, Slot, put
from lowband.engine.units.rank_shards import RankShards
from lowband.engine.units.slice_of import slice_of
from lowband.engine.units.states import UnitState
from lowband.engine.units.tied_to import tied_to
from lowband.engine.units.unusable import mark_replaced
from lowband.errors import UserError
from lowband.spec.partition import UnitLayout


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
        self.held = RankShards(self.layout, collectives, originals, names, initial, name)
        self.master, self.shards, self.is_whole = self.held.master, self.held.parameters, self.held.is_whole
        self.weights, self.secondary = self.held.weights, self.held.secondary
        self.partial_ranges, self.alike_ranges = self.held.partial_ranges, self.held.alike_ranges
        self.is_fetched = not self.is_whole or self.weights is not None  # whether computing needs a gather
        self._has_copy = self.weights is not None or self.held.beyond is not None
        self.changes = Changes(name, self.master, self.shards, self.held.disk)
        self.gathered_version = self.changes.version  # of the weights that were gathered last
        if self.scheme.update_gather != "native" and self.held.levels_of_refresh():
            self.gathered_version = -1  # the first ones are rounded on their way as all later ones are
        if self._has_copy and self.held.disk is None:
            self.changes.take_sample()
        self._unit_of = unit_of
        self._computed = self._new_leaves(originals)
        self.leaves = self._computed.leaves
        self._shown: Sequence[torch.Tensor] = self.leaves  # what the module has or had while it is whole
        self.is_put = False  # whether the module has them
        self._arriving: torch.Tensor | None = None  # the buffer that a gather fills
        # Without copies, and without other ranks, the optimizer's own values may change in a forward.
        self._is_alone = self.is_whole and self.weights is None and self.levels.world == 1
        self.state = UnitState.GATHERED if self.is_whole else UnitState.SHARDED
        self._gathering: Handle | None = None
        self._secondary_version: int | None = None  # version of the weights in the secondary shard
        self.grads = Gradients(self.leaves, self.shards, self.layout, self.optim_range, self.meter)
        self._put(self.shards, instead_of=originals)
        for original, (module, attribute) in zip(originals, (places[0] for places in slots), strict=True):
            mark_replaced(original, f"{name}: {type(module).__name__}.{attribute}")

    # ---- this rank's shards

    def range_of(self, level: str) -> tuple[int, int]:
        """This rank's range of the unit's elements over `level`, as (start, stop)."""
        return self.held.range_of(level)

    @property
    def optim_range(self) -> tuple[int, int]:
        """The range of the unit's elements that `master` covers, as (start, stop)."""
        return self.range_of(self.scheme.optim)

    # ---- what the module computes with

    def _new_leaves(self, originals: list[nn.Parameter]) -> Leaves:
        """Leaves without memory if the unit is to be gathered. See units.leaves, [Note: leaves]."""
        if self.is_whole:
            flat = self.master if self.weights is None else self.weights
        else:
            flat = torch.empty(self.layout.numel, dtype=self.compute_dtype, device=self.collectives.device)
        leaves = Leaves(self.name, originals, self.layout, flat)
        self._unit_of[flat.untyped_storage()._cdata] = self
        if not self.is_whole:
            self.meter.hold("start", flat)
            self.meter.release("start", flat.nbytes)
            flat.untyped_storage().resize_(0)
        return leaves

    def _compute_with(self, gathered: torch.Tensor | None, is_full: bool = True) -> None:
        """Let the leaves be views into a gathered buffer, or have no memory. is_full: see Leaves.empty"""
        leaves, unit_of = self._computed, self._unit_of
        before, kept = leaves.flat, [*leaves.kept]
        if gathered is None:
            leaves.empty(is_full)
        else:
            leaves.fill(gathered, self.gathered_version)
        if leaves.flat is before and not kept and not leaves.kept:
            return
        for storage in (before.untyped_storage()._cdata, *kept):
            unit_of.pop(storage, None)
        for storage in (leaves.flat.untyped_storage()._cdata, *leaves.kept):
            unit_of[storage] = self

    def put_shards(self) -> None:
        """Register this rank's shards in the module. See units.rank_shards, [Note: shards]."""
        self._put(self.shards, instead_of=self._shown)
        self.is_put = False
        self._shown = self.leaves  # DTensors would keep the gathered buffer

    def put_leaves(self) -> None:
        """Register the whole parameters in the module; new DTensors or views, where it sees them so."""
        if self._computed.are_dtensors():
            self.put_shards()
            self._shown = self._computed.shown()
        elif not self.is_whole and not torch._C._autograd._saved_tensors_hooks_is_enabled():
            self.put_shards()
            self._shown = self._computed.views()
        self.is_put = True
        self._put(self._shown, instead_of=self.shards)

    def _put(self, parameters: Sequence[torch.Tensor], instead_of: Sequence[torch.Tensor]) -> None:
        put(parameters, instead_of, self.slots, self.name)

    @property
    def own_copy(self) -> torch.Tensor | None:
        """The copy of the weights, 1D, if it is of the same elements as `master` and has its values."""
        is_current = self.gathered_version == self.changes.version
        is_own = self.weights is not None and self.weights.numel() == self.master.numel()
        return self.weights if is_current and is_own else None

    def copy_is_written(self, copy: torch.Tensor) -> None:
        """The optimizer whose step is about to end has written the new values to `own_copy`, too."""
        self.clear_padding()
        self.held.clear_padding(copy)
        self.gathered_version = self.changes.version + 1  # that of after the step
        self._computed.be_new()
        self.changes.take_sample()

    def clear_padding(self) -> None:
        """Make zeros of what was written behind parameters, if these are in memory all the time."""
        if self.held.disk is None:
            self.held.clear_padding(self.master)

    # ---- weights: gather and drop

    @property
    def flat(self) -> torch.Tensor:
        """The buffer that the leaves are views of."""
        return self._computed.flat

    def check_version(self, version: int) -> None:
        """Raises UserError if the weights are not those that a forward computed with any more."""
        if self.changes.version != version:
            raise UserError(
                f"weights of '{self.name}' changed between this forward and its backward",
                allowed="the optimizer's step after the backward of every forward",
            )

    def check_trains(self) -> None:
        """Raises UserError if the forward that ends now has frozen or unfrozen what it computes with."""
        changed = [leaf for leaf in self.leaves if leaf.requires_grad != self.requires_grad]
        for leaf in changed:
            leaf.requires_grad_(self.requires_grad)
        if changed:
            self.changes.refuse_frozen()

    def start_gather(self, backward: bool, trains: bool = True) -> None:
        """Submit the gather of the whole unit, unless it is already gathered or being gathered.

        trains: whether gradients may follow
        Raises UserError if the shards were replaced, moved, cast, frozen, or written through NumPy.
        """
        if self.is_whole and backward:  # its forward has looked
            return
        version = self.changes.version
        stale = version != self.gathered_version
        self.changes.check_shards(trains)
        if stale:
            self.clear_padding()
        if stale and self.held.disk is not None:
            self.held.disk.be_needed()
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
        levels = self.held.levels_of_gather(stale, from_secondary)
        self._arriving = self.meter.hold("gathered", self._computed.buffer())
        self.state = UnitState.GATHERING
        try:
            self._gathering = self.collectives.submit(
                self.name,
                levels,
                partial(
                    self.held.gather,
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
                self.gathered_version = -1  # the copy may be what it was, or in part
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
            self.held.keep_secondary(self.flat)
            self._secondary_version = self.gathered_version

    def drop(self) -> None:
        """Register the shards again, and free the unit's buffer unless it is held all the time.

        Raises UserError if weights were changed in place: they would be dropped, or differ between ranks.
        """
        if self._gathering is not None:  # prefetched but not used
            self.finish_gather()
        if self.is_put:
            self.put_shards()
        if self.state is not UnitState.GATHERED or self._is_alone:
            return
        is_changed = self._computed.are_changed()
        self._free()
        if is_changed:
            self._refuse_changes()

    def _refuse_changes(self) -> NoReturn:
        self._computed.forget_changes()
        if self.is_whole:  # the next gather fetches the weights anew, if there is a copy of them
            self.gathered_version = -1
        raise UserError(
            "weights were changed in place in a forward, where each rank computes with its own copy of them",
            where=f"unit '{self.name}'",
            allowed="buffers for what a forward changes; parameters changed outside of it",
        )

    def _free(self) -> None:
        """Free the gathered parameters, if they are not held all the time."""
        if not self.is_whole and self.state is not UnitState.SHARDED:
            self.meter.release("gathered", self.flat.nbytes)
            is_full, self._arriving = self._arriving is None, None
            self._compute_with(None, is_full)
            self.state = UnitState.SHARDED

    def _check_copy(self, stale: bool) -> None:
        """Before the copy of the weights is used, check for changes that no version counter shows."""
        if not self._has_copy or self.held.disk is not None:
            return
        if stale:
            self.changes.take_sample()
        else:
            self.changes.check_sample()

    def check_unchanged(self) -> None:
        """Refuse values that a forward wrote into what the module computes with, and an interrupted one has
        not dropped."""
        if not self.is_whole:
            self.drop()  # which refuses them, and frees what has them
        elif not self._is_alone and self._computed.are_changed():
            self._refuse_changes()

    def _refresh_whole(self, stale: bool) -> None:
        self._check_copy(stale)
        if stale:
            self.check_unchanged()
            self._computed.be_new()
        if stale and self.weights is not None:
            self._gathering = self.collectives.submit(
                self.name, self.held.levels_of_refresh(), self.held.refresh
            )
