"""`zero_grad` of optimizers on shards, and of modules around them: what waits behind them is discarded."""

from collections.abc import Iterable, Sequence
from functools import wraps
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from lowband.engine.units.changes import changes_of
from lowband.engine.units.known_optimizers import IS_KNOWN
from lowband.engine.units.waiting import discard

_UPDATES = "_lowband_updates"  # attribute of a whole matrix: the shards that its lowband.Matrices updates
_updating: WeakSet[nn.Parameter] = WeakSet()  # the whole matrices of all lowband.Matrices
_zero_grad, _zero_module = Optimizer.zero_grad, nn.Module.zero_grad


def mark_updated(wholes: Sequence[nn.Parameter], shards: Sequence[nn.Parameter]) -> None:
    """Have `zero_grad` of an optimizer that has whole matrices reach the shards, where gradients wait for a
    step that brings them to the matrices.

    wholes: those of one lowband.Matrices on this rank; shards: all that it updates
    """
    for whole in wholes:
        setattr(whole, _UPDATES, shards)
        _updating.add(whole)


def is_whole_matrix(parameter: nn.Parameter) -> bool:
    """Whether a lowband.Matrices made it."""
    return hasattr(parameter, _UPDATES)


def updated_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The shards that get what becomes of the optimizer's whole matrices, and others of these Matrices."""
    if not _updating:  # which is quicker
        return []
    own = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return list({shard: None for parameter in own for shard in getattr(parameter, _UPDATES, ())})


def _free_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Wait for late updates from those of these parameters, which are about to change."""
    for changes in {changes_of(parameter) for parameter in parameters}:
        if changes is not None and changes.disk is not None:
            changes.disk.frees_gradients()


@torch._disable_dynamo
@wraps(_zero_grad)
def _zero_all(optimizer: Optimizer, set_to_none: bool = True) -> None:
    """Discard also the gradients that wait under `no_sync`, or for lowband.Matrices."""
    own = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    updated = updated_of(optimizer)
    discard([*own, *updated])
    for shard in updated:
        shard.grad = None
    if not set_to_none:
        _free_gradients(own)
        _zero_grad(optimizer, set_to_none)
    elif hasattr(optimizer, IS_KNOWN):
        with torch._C.DisableTorchFunctionSubclass():  # quicker
            _zero_grad(optimizer, set_to_none)
    else:
        _zero_grad(optimizer, set_to_none)


@torch._disable_dynamo
@wraps(_zero_module)
def _zero_around(module: nn.Module, set_to_none: bool = True) -> None:
    """The same of a module around a sharded one, or of a part of one."""
    discard(module.parameters())
    if not set_to_none:
        _free_gradients(module.parameters())
    _zero_module(module, set_to_none)


Optimizer.zero_grad = _zero_all  # type: ignore[method-assign]
nn.Module.zero_grad = _zero_around  # type: ignore[method-assign]
