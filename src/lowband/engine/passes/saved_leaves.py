"""What autograd saves while units compute: their weights by name, everything else as without the engine.

A graph that referred to a gathered buffer would keep it alive from forward to backward. So of a leaf, or a
view of one, a saved-tensor hook keeps the unit and the place in it; when autograd asks for it, whichever node
asks first, the unit is gathered. Other tensors reach the hooks that were open outside of the module or of the
unit (activation checkpointing, `save_on_cpu`), because torch itself calls only the innermost pair.

Hooks opened inside of a unit's forward hide these. What they keep of a leaf stays valid, because a buffer is
filled before anybody sees it and never again; but it keeps the buffer alive, or is a copy.
"""

import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from lowband.engine.passes.kept_on_host import Kept, KeptOnHost
from lowband.engine.units.seen_as import SeenAs, local_of
from lowband.engine.units.shard_grad import ShardValues
from lowband.engine.units.shard_parameter import Leaf, ShardParameter
from lowband.engine.units.unit import Unit
from lowband.errors import UserError

_Pair = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class _Leaf(NamedTuple):
    """A leaf, or a view of one: its place in the unit's buffer.

    version: of the weights that the forward computed with
    """

    unit: Unit
    version: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Held(NamedTuple):
    """The same of a unit whose memory is never freed: the tensor itself, without a graph."""

    unit: Unit
    version: int
    tensor: torch.Tensor


class _Around(NamedTuple):
    """A DTensor around a leaf."""

    how: SeenAs
    leaf: _Leaf


# Any other tensor, and the version of its values when it was saved, which torch compares only without hooks.
_Other = tuple[torch.Tensor, int]


class SavedLeaves:
    """The saved-tensor hooks of one engine's forwards."""

    def __init__(
        self,
        unit_of: Mapping[int, Unit],
        before_use: Callable[[Unit, int], None],
        on_host: KeptOnHost | None,
    ) -> None:
        """unit_of:    units by the storage of their gathered weights, which they keep up to date
        before_use: called before saved weights are used, with their unit and version; gathers the unit
        on_host:    where other tensors go that some of the units save, not the module itself; or None
        """
        self.unit_of, self.before_use, self.on_host = unit_of, before_use, on_host
        self._entered = threading.local()

    def enter(self, owner: nn.Module) -> None:
        """From here to `leave(owner)`, in this thread, leaves are saved by name."""
        pushed, state = None, torch._C._autograd
        top = state._top_saved_tensors_default_hooks(True)
        innermost = getattr(top[0], "__self__", None) if top is not None else None
        is_open = isinstance(innermost, _Hooks) and innermost.of is self
        if not is_open and state._saved_tensors_hooks_is_enabled():
            hooks = _Hooks(self, top)
            pushed = saved_tensors_hooks(hooks.pack, hooks.unpack)
            pushed.__enter__()
        self._stack().append((owner, pushed))

    @property
    def keeps_on_host(self) -> bool:
        """Whether the innermost forward that runs in this thread is of a unit whose activations go there."""
        stack = self._stack()
        return self.on_host is not None and bool(stack) and stack[-1][0] in self.on_host.units

    def leave(self, owner: nn.Module) -> None:
        """Called after every forward, also after one that raised, perhaps before `enter`."""
        stack = self._stack()
        if stack and stack[-1][0] is owner:
            _, pushed = stack.pop()
            if pushed is not None:
                pushed.__exit__()

    def close(self) -> None:
        """Before a new forward, or outside of one: end what an interrupted forward has left in this thread.

        torch runs no hook after a KeyboardInterrupt. Hooks that others have left on top of these stay.
        """
        stack = self._stack()
        while stack:
            _, pushed = stack.pop()
            top = torch._C._autograd._top_saved_tensors_default_hooks(True)
            if pushed is not None and top is not None and top[0] == pushed.pack_hook:
                pushed.__exit__()

    def _stack(self) -> list[tuple[nn.Module, saved_tensors_hooks | None]]:
        if not hasattr(self._entered, "stack"):
            self._entered.stack = []
        stack: list[tuple[nn.Module, saved_tensors_hooks | None]] = self._entered.stack
        return stack


class _Hooks:
    """One pair of hooks, and the pair that was open outside of it.

    Every tensor that autograd saves passes through them: what most of them need comes first, without calls.
    """

    def __init__(self, of: SavedLeaves, outer: _Pair | None) -> None:
        self.of, self._outer, self._unit_of = of, outer, of.unit_of

    def pack(self, tensor: torch.Tensor) -> object:
        kind = type(tensor)
        if kind is ShardParameter:  # it would come back as a plain tensor, which no graph knows
            raise UserError(
                "a shard is saved for a backward, which computes with whole parameters",
                where=tensor.shard_of.name,
                allowed=ShardValues.computed_in,
            )
        local = None if kind is torch.Tensor or kind is Leaf else local_of(tensor)
        try:
            unit = self._unit_of.get((tensor if local is None else local).untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # e.g. a sparse tensor
            unit = None
        if unit is not None:
            if unit.is_whole and local is None:
                return _Held(unit, unit.gathered_version, tensor.detach())
            packed = _packed_leaf(tensor if local is None else local, unit)
            if packed is not None:
                return packed if local is None else _Around(SeenAs.of(tensor), packed)
        if self._outer is not None:
            return self._outer[0](tensor)
        if self.of.on_host is not None and self.of.keeps_on_host and type(tensor) is torch.Tensor:
            return self.of.on_host.stash(tensor)
        # Detached, because a node must not refer to its own output.
        return tensor.detach() if tensor.requires_grad else tensor, tensor._version

    def unpack(self, packed: Any) -> torch.Tensor:
        kind = type(packed)
        if kind is _Held:
            self.of.before_use(packed.unit, packed.version)
            held: torch.Tensor = packed.tensor
            return held
        if kind is _Leaf:
            self.of.before_use(packed.unit, packed.version)
            return packed.unit.flat.as_strided(packed.size, packed.stride, packed.offset)
        if kind is _Around:
            return packed.how.around(self.unpack(packed.leaf))
        if self._outer is not None:
            return self._outer[1](packed)
        if kind is Kept:
            assert self.of.on_host is not None
            return self.of.on_host.fetch(packed)
        other: _Other = packed
        tensor, version = other
        if tensor._version != version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace "
                f"operation: [{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; "
                f"expected version {version} instead."
            )
        return tensor


def _packed_leaf(tensor: torch.Tensor, unit: Unit) -> _Leaf | None:
    # A view whose sign is changed when it is read has values that its place alone does not say.
    if tensor.dtype == unit.flat.dtype and not (tensor.is_neg() or tensor.is_conj()):
        place = tensor.size(), tensor.stride(), tensor.storage_offset()
        return _Leaf(unit, unit.gathered_version, *place)
    return None
