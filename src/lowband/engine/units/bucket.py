"""Units whose gradients are reduced together (spec.buckets; in most schemes one unit), over the levels.

Within a backward pass the gradient is reduced to the grads level; at an accumulation boundary the sum is
reduced further to the optimizer's level, where it is averaged over the replica (without sync, all ranks).

[Note: kept] A bucket of several units that is reduced in place ends as its optimizer's gradients. Once these
are set to None the next backward fills their memory again, unless somebody still has a view of it. Freed, it
would go to activations, and a heap of fragments has no place for another as large.
DDP keeps its buckets, too.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate, pairwise

import torch
from torch import nn

from lowband.cost.memory import averages_exactly
from lowband.engine.collectives.copies import settle, stash
from lowband.engine.collectives.wire import name_of
from lowband.engine.transport.call import Call
from lowband.engine.transport.lane import Handle, Work
from lowband.engine.units.gradients import Taken
from lowband.engine.units.unit import Unit
from lowband.engine.units.waiting import Waiting
from lowband.spec.buckets import buckets
from lowband.spec.partition import intersect, shard_range
from lowband.spec.step import reductions
from lowband.spec.tiers import DEVICE, at


class Bucket:
    """The gradients of its units on one rank: the shards it holds and the reduction it still waits for."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        first, last = units[0], units[-1]
        self._dtype = first.collectives.options.reduce_dtype
        self.name = first.name if first is last else f"{first.name} to {last.name}"
        self._collectives, self._meter = first.collectives, first.meter
        ends = list(accumulate((unit.layout.numel for unit in units), initial=0))
        self._ranges, self._numel = dict(zip(units, pairwise(ends), strict=True)), ends[-1]
        self._ranks = first.levels.size(first.scheme.level("replica")) * first.expert_ranks
        self.tier = first.scheme.update_tier
        self._handed = at("grads", self.tier)  # of the gradients that the optimizer's parameters have
        self._has_partial = any(unit.partial_ranges for unit in units)
        self._has_tied = any(unit.tied is not None for unit in units)
        self._levels = {at_boundary: self._levels_of_reduction(at_boundary) for at_boundary in (False, True)}
        self._reducing: Handle | None = None
        self._is_reduced = False  # whether this backward has submitted a reduction
        self._filling: torch.Tensor | None = None  # 1D, in the reduce dtype, of all units
        self._filled: set[Unit] = set()  # those whose gradients it has
        self._kept: torch.Tensor | None = None  # the last step's gradients, see [Note: kept]
        self._accumulated: torch.Tensor | None = None  # 1D, shards of `grads`, fp32
        self.waiting = Waiting(self._discard)  # for what is accumulated
        self._boundary: torch.Tensor | None = None  # 1D, shards of `optim`, fp32
        self._handed_bytes = 0  # of the gradients that the optimizer's parameters have

    def expect(self) -> None:
        """Prepare for a backward that begins."""
        self.waiting.begin()
        self._is_reduced = False
        if all(unit.grads.are_unset for unit in self.units):
            self._meter.release(self._handed, self._handed_bytes)
            self._handed_bytes = 0

    @property
    def needs_reduce(self) -> bool:
        """Whether gradients of this backward, including late ones, have not been reduced yet."""
        return not self._is_reduced or any(unit.grads.are_waiting for unit in self.units)

    # ---- over the levels

    def start_reduce(self, at_boundary: bool) -> None:
        """Submit the reduction of the gradients; at the boundary, to the optimizer's level."""
        self.wait_reduce()  # there may be an earlier one in this backward
        self._is_reduced = True
        if not at_boundary:
            self.waiting.be_of(shard for unit in self.units for shard in unit.shards)
        elif self.waiting.shards:
            self.waiting.be_of(())
        first, *others = self.units
        if others:
            for unit in self.units:
                self.add(unit)
            assert self._filling is not None
            taken = Taken([], [self._filling])
            self._filling = None
            self._filled.clear()
        else:
            taken = first.grads.take(self._dtype)
        self._reducing = self._collectives.submit(
            self.name,
            self._levels[at_boundary],
            partial(self._reduce, taken=taken, at_boundary=at_boundary),
            uses=[*taken.grads, *taken.flat, self._accumulated],
        )

    @torch.no_grad()
    def add(self, unit: Unit) -> None:
        """A unit's gradients are there: move them to where they wait for the others', so that they are freed.

        Those that come late are added.

        Those of a bucket's only unit are moved later, behind the computation.
        """
        if len(self.units) == 1:
            return
        if self._filling is None:
            self._filling = self._empty()
        start, stop = self._ranges[unit]
        part, taken = self._filling[start:stop], unit.grads.take(self._dtype)
        if unit in self._filled:  # see passes.hooks, [Note: late gradients]
            taken.add_to(part, unit.layout)
        else:
            taken.move_to(part, unit.layout)
            self._filled.add(unit)

    def _empty(self) -> torch.Tensor:
        """1D, in the reduce dtype, of all units. See [Note: kept]."""
        kept, self._kept = self._kept, None
        # Two refer to the storage of a tensor that nobody else has: the tensor, and who asks.
        if kept is not None and torch._C._storage_Use_Count(kept.untyped_storage()._cdata) == 2:
            return kept
        return torch.empty(self._numel, dtype=self._dtype, device=self._collectives.device)

    def _can_keep(self, reduced: torch.Tensor) -> bool:
        """Not what torch.func's transforms have wrapped, which is gone with them."""
        is_alike = reduced.numel() == self._numel and reduced.dtype == self._dtype and self.tier == DEVICE
        return (
            len(self.units) > 1 and is_alike and not torch._C._functorch.is_functorch_wrapped_tensor(reduced)
        )

    def wait_reduce(self) -> None:
        """Wait for the reduction. Raises, once, the error that it raised."""
        if self._reducing is not None:
            reducing, self._reducing = self._reducing, None
            reducing.wait()

    def _levels_of_reduction(self, at_boundary: bool) -> list[str]:
        rows = reductions("pass") + (reductions("step") if at_boundary else [])
        levels = [level for row in rows for level in self._collectives.levels_of_reduction(row, self._dtype)]
        return [*levels, self.tier] if at_boundary and self.tier != DEVICE else levels

    def _reduce(self, call: Call, taken: Taken, at_boundary: bool) -> Work:
        meter, first = self._meter, self.units[0]
        # A list, so that only the collective refers to the gradient while it is being sent.
        if taken.flat:
            moving = [call.hold(taken.flat.pop())]
        else:
            empty = torch.empty(first.layout.numel, dtype=self._dtype, device=self._collectives.device)
            moving = [call.hold(empty)]
            del empty
            taken.move_to(moving[0], first.layout)
        for row in reductions("pass"):
            moving.append((yield from self._collectives.reduce(call, moving.pop(), row)))
        part = moving.pop()
        if self._accumulated is not None:
            self._accumulated += part
        elif not at_boundary:
            self._accumulated = meter.hold("grads", part.float())
        if self._accumulated is not None:
            call.release(part)
        if not at_boundary:
            return
        if self._accumulated is not None:
            meter.release("grads", self._accumulated.nbytes)
            part, self._accumulated = call.hold(self._accumulated.to(self._dtype)), None
        # Reduce to the optimizer's level, and average over the replica.
        moving.append(part)
        del part
        *inner, last = reductions("step")
        for row in inner:
            moving.append((yield from self._collectives.reduce(call, moving.pop(), row)))
        is_fp32 = self._dtype == torch.float32  # averages are: then each rank can take those of its sums
        average = self._average if is_fp32 else lambda _: None
        part = yield from self._collectives.reduce(call, moving.pop(), last, average)
        call.release(part)
        if not is_fp32:
            part = part if self._hands_over_reduced else part.float()
            self._average(part)
        if self.tier != DEVICE:
            part = yield from stash(call, call.hold(part))
        self._take_boundary(part)

    def _take_boundary(self, part: torch.Tensor) -> None:
        if self._boundary is None:
            self._boundary = self._meter.hold(self._handed, part)
        else:  # a second reduction in one backward: see Backward.end
            self.settle()
            self._meter.release(self._handed, self._boundary.nbytes)
            self._boundary = self._meter.hold(self._handed, self._boundary.float().add_(part))

    @property
    def _hands_over_reduced(self) -> bool:
        """Whether gradients keep the reduce dtype, of which the optimizer takes them."""
        return self.units[0].grads.takes_reduced and averages_exactly(self._ranks)

    def settle(self) -> None:
        """Return when gradients that were stashed may be read."""
        if self.tier != DEVICE:
            settle(self._collectives.device)

    def _average(self, summed: torch.Tensor) -> None:
        if self._ranks > 1:
            summed /= self._ranks

    # ---- to the optimizer's parameters

    @property
    def partial_sums(self) -> list[torch.Tensor]:
        """Of the gradients at the optimizer's level, those of this rank's tokens alone, 1D; after
        `wait_reduce`."""
        if not self._has_partial:
            return []
        return [part[start:stop] for unit, part in self._parts() for start, stop in unit.partial_ranges]

    @property
    def alike_parts(self) -> list[tuple[str, torch.Tensor]]:
        """Of the gradients at the optimizer's level, those that all tensor ranks are to have, by name."""
        return [
            (name, part[start:stop])
            for unit, part in self._parts()
            for name, start, stop in unit.alike_ranges
        ]

    @property
    def tied_parts(self) -> list[tuple[Unit, torch.Tensor]]:
        """Of the gradients at the optimizer's level, those of units of which other stages have copies."""
        if not self._has_tied:
            return []
        return [(unit, part) for unit, part in self._parts() if unit.tied is not None]

    def _parts(self) -> list[tuple[Unit, torch.Tensor]]:
        """By unit the gradients at the optimizer's level, 1D; none before a boundary."""
        if self._boundary is None:
            return []
        if len(self.units) == 1:
            return [(self.units[0], self._boundary)]
        parts = self._boundary.split([unit.master.numel() for unit in self.units])
        return list(zip(self.units, parts, strict=True))

    def finish_reduce(self) -> None:
        """Wait for the reduction; at a boundary, set the gradients of the optimizer's parameters."""
        self.wait_reduce()
        self.waiting.end()
        if self._boundary is None:
            return
        boundary, parts, self._boundary = self._boundary, self._parts(), None
        if all(unit.grads.are_unset for unit in self.units):
            self._handed_bytes = boundary.nbytes
            self._kept = boundary if self._can_keep(boundary) else None
        else:  # gradients accumulate without no_sync
            self._meter.release(self._handed, boundary.nbytes)
        for unit, part in parts:
            unit.grads.hand_over(part)

    def forget(self) -> None:
        """Discard all gradients that the optimizer's parameters do not have yet."""
        with suppress(RuntimeError):  # the backward has failed already
            self.wait_reduce()
        for unit in self.units:
            unit.grads.forget()
        for kind, held in (("grads", self._accumulated), (self._handed, self._boundary)):
            self._meter.release(kind, 0 if held is None else held.nbytes)
        self._accumulated = self._boundary = self._filling = None
        self._filled.clear()
        self.waiting.be_of(())

    @torch.no_grad()
    def _discard(self, shards: set[nn.Parameter]) -> None:
        """Discard what passes under `no_sync` have accumulated for some of the optimizer's parameters."""
        self.wait_reduce()
        left = self.waiting.shards - shards
        if self._accumulated is not None and left:
            first = self.units[0]
            held = shard_range(self._numel, first.levels, first.scheme.grads, first.rank)
            for unit in self.units:
                place = self._ranges[unit][0]
                for shard, (start, stop) in zip(unit.shards, unit.layout.spans(), strict=True):
                    if shard in shards:
                        a, b = intersect((place + start, place + stop), held)
                        self._accumulated[a - held[0] : b - held[0]] = 0
        elif self._accumulated is not None:
            self._meter.release("grads", self._accumulated.nbytes)
            self._accumulated = None
        self.waiting.be_of(left)


def collect(units: Sequence[Unit]) -> list[Bucket]:
    """The buckets of units, which are in the order in which their gradients become ready.

    Only units with one placement share a bucket.
    """
    by_placement: dict[object, list[Unit]] = {}
    for unit in units:
        if unit.requires_grad:
            by_placement.setdefault(unit.collectives, []).append(unit)
    found = []
    for alike in by_placement.values():
        numels, first = [unit.layout.numel for unit in alike], alike[0]
        reduce_dtype = name_of(first.collectives.options.reduce_dtype)
        for places in buckets(numels, first.scheme, first.levels, reduce_dtype):
            found.append(Bucket([alike[place] for place in places]))
    return found
