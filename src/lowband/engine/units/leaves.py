"""What a unit's module computes with: the unit's parameters, with memory while they are gathered.

[Note: leaves] The module computes with `leaves`: parameters that live as long as the unit, so that autograd's
graph stays valid. Each gather fills a new buffer, and only when it is full do the leaves become views into
it, by `.data`, which autograd does not see as a change. So nobody can read a buffer that is being filled. The
graph holds no buffer (passes.saved_leaves), so it is freed when the unit is dropped. Values in forward and
backward are the same, unless a scheme gives their gathers different wires: then the backward intentionally
uses its own wire's values.

[Note: kept views] A program may keep a view of a weight, with the buffer behind it. In a plain module it
would show each step's new values. So a buffer that somebody still refers to when the unit is dropped is
filled again whenever newer weights have been gathered.

[Note: same buffer] A buffer to which nobody else refers is freed behind the leaves, which stay views of it,
and gets new memory at the next gather: quicker than new views of another one. The leaves refuse their use
until it is full, and there are no other views. Not after a gather that failed: messages may still arrive; and
not once NumPy has seen the buffer, because torch then lets nobody resize it.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef

from lowband.engine.units.own_attributes import keep_attributes
from lowband.engine.units.seen_as import seen_as, shown
from lowband.engine.units.shard_parameter import Leaf
from lowband.engine.units.steps import mark_leaf
from lowband.engine.units.unusable import mark_dropped, mark_gathered
from lowband.errors import UserError
from lowband.spec.partition import UnitLayout

Slot = tuple[nn.Module, str]  # where a parameter is registered: module and attribute


class Leaves:
    """A unit's leaves, and the buffer that they are views of.

    flat:   the buffer, 1D
    leaves: one per parameter
    kept:   earlier buffers of which others keep views, see [Note: kept views]
    """

    def __init__(
        self, unit: str, originals: Sequence[nn.Parameter], layout: UnitLayout, flat: torch.Tensor
    ) -> None:
        """flat: the unit's values, or a buffer whose memory is then freed"""
        self.flat, self._unit, data = flat, unit, flat.data
        places = zip(originals, layout.ranges(), strict=True)
        values = [data[start:stop].view(original.shape) for original, (start, stop) in places]
        self._places = [(value.size(), value.stride(), value.storage_offset()) for value in values]
        self.leaves = [
            Leaf(value, original.requires_grad) for value, original in zip(values, originals, strict=True)
        ]
        for leaf, original in zip(self.leaves, originals, strict=True):
            keep_attributes(original, leaf)
            mark_leaf(leaf, unit)
            leaf.place = unit
        self._seen_as = [seen_as(original) for original in originals]
        self._without_memory = flat, values
        self._is_same = False  # whether the next gather may fill `flat`, see [Note: same buffer]
        # By storage, whose place in memory nothing else gets before the reference is gone; with versions.
        self.kept: dict[int, tuple[StorageWeakRef, int]] = {}
        self._version = 0  # of the weights in the buffer
        self.forget_changes()

    def buffer(self) -> torch.Tensor:
        """What the next gather is to fill."""
        if not self._is_same:
            with outside_of_modes():
                return torch.empty_like(self.flat)
        self.flat.untyped_storage().resize_(self.flat.nbytes)
        return self.flat

    def fill(self, flat: torch.Tensor, version: int) -> None:
        """Let the leaves be views into a gathered buffer. version: of its weights"""
        if flat is self.flat:
            mark_gathered(self.leaves)
        else:
            with outside_of_modes():
                self._compute_with(flat, [flat.as_strided(*place) for place in self._places])
        if self.kept:
            with outside_of_modes():
                self._fill_kept(flat, version)
        if version != self._version:
            self.be_new()
        self._version = version

    def empty(self, is_full: bool) -> None:
        """Let the leaves have no memory. is_full: whether the buffer was, and not only to be filled"""
        flat = self.flat
        storage = flat.untyped_storage()
        # Two refer to the storage of a tensor that nobody else has: the tensor, and who asks.
        others = torch._C._storage_Use_Count(storage._cdata) - 2 - len(self.leaves)
        may_stay = is_full and not others and not isinstance(flat, FakeTensor)
        self._is_same = may_stay and storage.resizable()
        if self._is_same:
            storage.resize_(0)
        else:
            with outside_of_modes():
                self._compute_with(*self._without_memory)
        mark_dropped(self.leaves)
        if is_full and others:
            reference = StorageWeakRef(storage)
            self.kept[reference.cdata] = reference, self._version

    def _fill_kept(self, flat: torch.Tensor, version: int) -> None:
        """See [Note: kept views]."""
        for place, (reference, before) in list(self.kept.items()):
            storage = torch.UntypedStorage._new_with_weak_ptr(place)
            if storage is None:
                del self.kept[place]
            elif before != version:
                flat.new_empty(0).set_(storage, 0, flat.shape).copy_(flat)
                self.kept[place] = reference, version
                increment_version(self.leaves)  # and their views': torch refuses graphs over the old values
        self.forget_changes()

    def are_changed(self) -> bool:
        """Whether they were changed in place since they were filled."""
        return [leaf._version for leaf in self.leaves] != self._versions

    def be_new(self) -> None:
        """Count a change of the values, as a step in place does: programs keep what they make of a weight."""
        increment_version(self.leaves)
        self.forget_changes()

    def forget_changes(self) -> None:
        """What they have now is what is to stay."""
        self._versions = [leaf._version for leaf in self.leaves]

    def are_dtensors(self) -> bool:
        """Whether the module sees some of them as DTensors, which are to be new ones at each gather."""
        return any(self._seen_as)

    def shown(self) -> list[torch.Tensor]:
        """What the module is to have: the leaves, or new DTensors around them."""
        return [shown(leaf, how) for leaf, how in zip(self.leaves, self._seen_as, strict=True)]

    def views(self) -> list[torch.Tensor]:
        """What the module is to have in torch.func.grad and vjp, in whose graphs nothing is saved by name: a
        second derivative finds the buffer by these, which keep it.
        """
        with outside_of_modes(), torch.enable_grad():
            return [leaf.view_as(leaf) for leaf in self.leaves]

    def _compute_with(self, flat: torch.Tensor, values: list[torch.Tensor]) -> None:
        """Let the leaves have these values, views into `flat`."""
        self.flat = flat
        mark_gathered(self.leaves)
        for leaf, value in zip(self.leaves, values, strict=True):
            torch.Tensor.data.__set__(leaf, value)
        self.forget_changes()


def put(
    parameters: Sequence[torch.Tensor],
    instead_of: Sequence[torch.Tensor],
    slots: Sequence[Sequence[Slot]],
    unit: str,
) -> None:
    """Register `parameters` at their slots. Raises UserError if other code has changed the registration."""
    for places, parameter, before in zip(slots, parameters, instead_of, strict=True):
        for module, attribute in places:
            found = module._parameters.get(attribute)
            if found is not before and found is not parameter:
                raise UserError(
                    "the parameter was replaced or removed after lowband.shard",
                    where=f"{type(module).__name__}.{attribute} of '{unit}'",
                    allowed="changes before lowband.shard",
                )
            module._parameters[attribute] = parameter  # type: ignore[assignment]


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """Outside of the caller's inference mode, because the lane fills buffers outside of it, and of
    torch.func's transforms, which would wrap them.
    """
    with torch.inference_mode(False), torch._C._DisableFuncTorch():
        yield
