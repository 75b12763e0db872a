"""What a forward is given: the caller's arguments, with floating-point tensors in the compute dtype.

[Note: changes] A forward may change what it is given: put a side loss into a list, write to a cache. So what
need not be cast stays the caller's own. Of the rest the forward gets copies, tensors and the containers
around them, one of each however often it is given; after it the caller's change as the copies have, and
what it returns has the caller's containers.
"""

import threading
from collections import OrderedDict, defaultdict, deque
from collections.abc import Mapping
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import TreeSpec, tree_unflatten

from lowband.engine.passes.nested import inside
from lowband.errors import UserError


class _Cast(NamedTuple):
    """A tensor of the caller's, its copy, and what shows that a forward has changed the copy.

    version: the copy's before the forward; None in inference mode, which counts none
    node:    of the graph, that made the copy
    """

    given: torch.Tensor
    copy: torch.Tensor
    version: int | None
    node: Any

    @classmethod
    def of(cls, given: torch.Tensor, copy: torch.Tensor) -> "_Cast":
        return cls(given, copy, None if copy.is_inference() else copy._version, copy.grad_fn)

    def give_back(self, where: str) -> None:
        given, copy = self.given, self.copy
        if self._is_equal() if self.version is None else copy._version == self.version:
            return
        # What was written outside of the graph stays outside: there even a leaf may be changed.
        with torch.set_grad_enabled(torch.is_grad_enabled() and copy.grad_fn is not self.node):
            if given.shape != copy.shape:
                self._reshape(where)
            if not torch.is_grad_enabled():  # what was not written is not rounded
                copy = torch.where(copy == given.to(copy.dtype), given, copy.to(given.dtype))
            given.copy_(copy)

    def _is_equal(self) -> bool:
        return self.copy.shape == self.given.shape and torch.equal(self.copy, self.given.to(self.copy.dtype))

    def _reshape(self, where: str) -> None:
        """As unsqueeze_, t_ and the like have done with the copy."""
        given, copy = self.given, self.copy
        if given.numel() != copy.numel() or given.to(copy.dtype).stride() != given.stride():
            raise UserError(
                f"an input of shape {[*given.shape]} has got {[*copy.shape]} in place",
                where=where,
                allowed="inputs that are contiguous, or shapes changed out of place",
            )
        given.as_strided_(copy.shape, copy.stride(), given.storage_offset())


class _Copied(NamedTuple):
    """A container of the caller's, its copy, and what was in the copy."""

    given: Any
    copy: Any
    values: list[Any]
    structure: TreeSpec

    def give_back(self, own: Mapping[int, Any]) -> None:
        values, structure = inside(self.copy)
        if structure == self.structure and all(map(is_, values, self.values)):
            return
        given, now = self.given, tree_unflatten([_with_own(value, own) for value in values], structure)
        if type(given) is list:
            given[:] = now
        elif type(given) is deque:
            given.clear()
            given.extend(now)
        elif type(given) in (dict, OrderedDict, defaultdict):
            given.clear()
            given.update(now)
        elif not isinstance(given, tuple | dict) and hasattr(given, "__dict__"):
            vars(given).update(vars(now))


class _Given:
    """The arguments of one forward."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._casts: list[_Cast] = []
        self._copied: list[_Copied] = []
        self._known: dict[int, tuple[Any, Any]] = {}  # what was given, which so keeps its id, and what is got

    def cast(self, value: Any) -> Any:
        if value is None or isinstance(value, int | float | str):
            return value
        if id(value) not in self._known:
            self._known[id(value)] = value, value  # while it is opened, for one that is in itself
            self._known[id(value)] = value, self._new(value)
        return self._known[id(value)][1]

    def _new(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            copy = value.to(self._dtype) if value.is_floating_point() else value
            if copy is not value:
                self._casts.append(_Cast.of(value, copy))
            return copy
        values, structure = inside(value)
        if structure.is_leaf():
            return value
        got = [self.cast(inner) for inner in values]
        if all(map(is_, got, values)):
            return value
        copy = tree_unflatten(got, structure)
        self._copied.append(_Copied(value, copy, got, structure))
        return copy

    def give_back(self, output: Any, where: str) -> Any:
        """Returns the output with the caller's own containers."""
        for cast in self._casts:
            cast.give_back(where)
        if not self._copied:
            return output
        containers = {id(each.copy): each.given for each in self._copied}
        own = containers | {id(cast.copy): cast.given for cast in self._casts}
        own |= {id(each.given): each.given for each in self._copied}  # which may be in itself
        for copied in self._copied:
            copied.give_back(own)
        return _with_own(output, containers)


class Inputs:
    """The arguments of the forwards that run, by thread."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._running = threading.local()

    def cast(self, owner: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What `owner` gets; until `give_back(owner)`, in this thread."""
        given = _Given(self._dtype)
        got = tuple([given.cast(value) for value in args])
        named = {name: given.cast(value) for name, value in kwargs.items()}
        self._stack().append((owner, given))
        return got, named

    def give_back(self, owner: nn.Module, output: Any) -> Any:
        """Called after every forward, also after one that raised, perhaps before `cast`. Returns the output
        with the caller's own containers.
        """
        stack = self._stack()
        if not stack or stack[-1][0] is not owner:
            return output
        return stack.pop()[1].give_back(output, type(owner).__name__)

    def close(self) -> None:
        """Before a new forward: forget what an interrupted one has left in this thread."""
        self._stack().clear()

    def _stack(self) -> list[tuple[nn.Module, _Given]]:
        if not hasattr(self._running, "stack"):
            self._running.stack = []
        stack: list[tuple[nn.Module, _Given]] = self._running.stack
        return stack


def _with_own(value: Any, own: Mapping[int, Any]) -> Any:
    """A value with the caller's own in place of copies, by their ids."""
    if id(value) in own:
        return own[id(value)]
    values, structure = inside(value)
    if structure.is_leaf():
        return value
    now = [_with_own(inner, own) for inner in values]
    return value if all(map(is_, now, values)) else tree_unflatten(now, structure)
