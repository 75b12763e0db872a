"""What a forward is given: the caller's arguments, with floating-point tensors in the compute dtype.

[Note: changes] A forward may change what it is given: put a side loss into a list, write to a cache. So what
need not be cast stays the caller's own. Of the rest the forward gets copies, tensors and the lists and dicts
around them, and after it the caller's change as the copies have.
"""

import threading
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

_CONTAINERS = (list, dict, OrderedDict, defaultdict)


class _Cast(NamedTuple):
    """A tensor of the caller's, its copy, and the copy's version before the forward."""

    given: torch.Tensor
    copy: torch.Tensor
    version: int

    def give_back(self) -> None:
        if self.copy._version != self.version:
            self.given.copy_(self.copy)


class _Copied(NamedTuple):
    """A container of the caller's, its copy, and what was in both."""

    given: Any
    copy: Any
    values: list[tuple[Any, Any]]

    def give_back(self) -> None:
        own = {id(copy): given for given, copy in self.values}
        is_list = isinstance(self.copy, list)
        now = [own.get(id(value), value) for value in (self.copy if is_list else self.copy.values())]
        is_same = len(now) == len(self.values) and all(
            a is b for a, (b, _) in zip(now, self.values, strict=True)
        )
        if is_list and not is_same:
            self.given[:] = now
        elif not is_list and not (is_same and list(self.given) == list(self.copy)):
            self.given.clear()
            self.given.update(zip(self.copy, now, strict=True))


class Inputs:
    """The arguments of the forwards that run, by thread."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._running = threading.local()

    def cast(self, owner: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What `owner` gets; until `give_back(owner)`, in this thread."""
        copies: list[_Cast | _Copied] = []
        got = tuple([self._cast(value, copies) for value in args])
        named = {name: self._cast(value, copies) for name, value in kwargs.items()}
        self._stack().append((owner, copies))
        return got, named

    def give_back(self, owner: nn.Module) -> None:
        """Called after every forward, also after one that raised, perhaps before `cast`."""
        stack = self._stack()
        if stack and stack[-1][0] is owner:
            for each in stack.pop()[1]:
                each.give_back()

    def close(self) -> None:
        """Before a new forward: forget what an interrupted one has left in this thread."""
        self._stack().clear()

    def _cast(self, value: Any, copies: list[_Cast | _Copied]) -> Any:
        if isinstance(value, torch.Tensor):
            copy = value.to(self._dtype) if value.is_floating_point() else value
            if copy is not value and not copy.is_inference():
                copies.append(_Cast(value, copy, copy._version))
            return copy
        if value is None or isinstance(value, int | float | str):
            return value
        values, structure = tree_flatten(value, is_leaf=lambda inner: inner is not value)
        if structure.is_leaf():
            return value
        got = [self._cast(inner, copies) for inner in values]
        if all(a is b for a, b in zip(got, values, strict=True)):
            return value
        copied = tree_unflatten(got, structure)
        if type(value) in _CONTAINERS:
            copies.append(_Copied(value, copied, list(zip(values, got, strict=True))))
        return copied

    def _stack(self) -> list[tuple[nn.Module, list[_Cast | _Copied]]]:
        if not hasattr(self._running, "stack"):
            self._running.stack = []
        stack: list[tuple[nn.Module, list[_Cast | _Copied]]] = self._running.stack
        return stack
