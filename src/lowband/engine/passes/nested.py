"""Tensors inside of what a forward takes or returns.

torch's pytree opens the containers that it knows. A model may also return a dataclass, a SimpleNamespace or a
dict of its own class, which are leaves to pytree; here they are opened, too.
"""

import copy
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from itertools import count
from operator import is_
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten


def requiring_grad(values: Any) -> list[torch.Tensor]:
    """The tensors in nested values that require gradients."""
    if isinstance(values, torch.Tensor):  # as most outputs are
        return [values] if values.requires_grad else []
    found = []
    for value in tree_leaves(values):
        if isinstance(value, torch.Tensor):
            found += [value] if value.requires_grad else []
        elif inner := _opened(value):
            found += requiring_grad(inner)
    return found


def differentiable(values: Any) -> list[torch.Tensor]:
    """As `requiring_grad`; none where gradients are disabled."""
    return requiring_grad(values) if torch.is_grad_enabled() else []


def replaced(values: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Nested values with each of their tensors changed; each container that has none is the same object."""
    found, structure = inside(values)
    if structure.is_leaf():
        return _replaced(values, change)
    changed = [replaced(value, change) for value in found]
    return values if all(map(is_, changed, found)) else tree_unflatten(changed, structure)


def inside(value: Any) -> tuple[list[Any], TreeSpec]:
    """What is in a container that pytree knows, one level deep; the container may be in itself."""
    calls = count()
    return tree_flatten(value, is_leaf=lambda _: next(calls) > 0)


def _replaced(leaf: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(leaf, torch.Tensor):
        return change(leaf)
    inner = _opened(leaf)
    changed = {key: replaced(value, change) for key, value in inner.items()}
    if all(changed[key] is inner[key] for key in inner):
        return leaf
    copied = copy.copy(leaf)
    for key, value in changed.items():
        if isinstance(copied, dict):
            copied[key] = value
        else:
            object.__setattr__(copied, key, value)  # the dataclass may be frozen
    return copied


def _opened(value: Any) -> dict[Any, Any]:
    """The values in a container that pytree takes for a leaf; empty for anything else."""
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, SimpleNamespace):
        return dict(vars(value))
    if is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in fields(value) if hasattr(value, field.name)]
        return {name: getattr(value, name) for name in names}
    return {}
