"""`state_dict()` and `load_state_dict()` of a sharded module, and copies of its parts, are refused: they
would move one rank's part.

[Note: optimizers] An optimizer's `state_dict()` is this rank's part, and is allowed: each rank may save its
own. torch.distributed.checkpoint would take it for a copy that all ranks have, and keep one rank's. It gives
nothing else to tell its calls by, so they are found on the stack.
"""

import sys
from collections.abc import Iterable
from contextvars import ContextVar
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from lowband.engine.units.shard_grad import ShardValues
from lowband.engine.units.shard_parameter import ShardParameter
from lowband.errors import UserError

_is_own = ContextVar("_is_own", default=False)  # whether the engine itself reads the state


def refuse_state_dicts(modules: Iterable[nn.Module]) -> None:
    """Make these, copies and pickles raise UserError on these modules, and on every module around them."""
    for module in modules:
        module.register_state_dict_pre_hook(_RefuseSave(type(module).__name__))
        module.register_load_state_dict_pre_hook(_refuse_load)


def own_state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    """The module's state_dict with this rank's shards in the place of parameters.

    Raises UserError for what a hook, a module's own method or a buffer has of a part: the state would be of
    this rank.
    """
    return _without_parts(module, _state_dict(module))


def own_buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """The persistent buffers by their place in the module, whatever a hook of state_dict() calls them.

    Raises UserError for one that has values of a part.
    """
    state = _state_dict(module)
    kept = {id(value) for value in state.values()}
    named = module.named_buffers(remove_duplicate=False)
    found = {name: buffer for name, buffer in named if name in state or id(buffer) in kept}
    return _without_parts(module, found)


def refuse_sparse(name: str, buffer: torch.Tensor, where: str) -> None:
    """Raise UserError for a buffer that no file can hold."""
    if buffer.layout != torch.strided:
        allowed = "dense ones; persistent=False, which is in no checkpoint"
        raise UserError(f"buffer '{name}' is sparse or nested", where=where, allowed=allowed)


def _state_dict(module: nn.Module) -> dict[str, torch.Tensor]:
    token = _is_own.set(True)
    try:
        return module.state_dict(keep_vars=True)  # shards on a disk have no memory to look at
    finally:
        _is_own.reset(token)


def _without_parts(module: nn.Module, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for name, value in state.items():
        if isinstance(value, ShardValues):
            raise UserError(
                f"'{name}' of its state_dict() was computed from this rank's part of a parameter",
                where=type(module).__name__,
                allowed="parameters as they are, under any names; buffers without values of shards",
            )
    return state


class _RefuseSave:
    """The hook before `state_dict()`, which whoever copies the module copies with it."""

    def __init__(self, where: str) -> None:
        self._where = where

    def __call__(self, _module: nn.Module, _prefix: str, _keep_vars: bool) -> None:
        if not _is_own.get():
            raise UserError(
                "state_dict() of a sharded module would hold this rank's part only",
                where=self._where,
                allowed="lowband.full_state_dict(module), lowband.save_safetensors, lowband.Checkpointer",
            )

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise UserError(
            "a part of a sharded module cannot be copied or pickled: it has this rank's part of its weights",
            where=self._where,
            allowed="a copy made before lowband.shard; lowband.full_state_dict(module), lowband.Checkpointer",
        )


def _refuse_load(module: nn.Module, *_: Any) -> NoReturn:
    raise UserError(
        "load_state_dict() of a sharded module would have to fit whole parameters into shards",
        where=type(module).__name__,
        allowed="before lowband.shard; its init=lowband.Safetensors(folder); lowband.Checkpointer.load",
    )


_watched: WeakSet[Optimizer] = WeakSet()  # those with shards that have made a step


def _watch(optimizer: Optimizer, *_: Any) -> None:
    if optimizer not in _watched and any(
        isinstance(parameter, ShardParameter)
        for group in optimizer.param_groups
        for parameter in group["params"]
    ):
        _watched.add(optimizer)
        if not hasattr(optimizer, "_optimizer_state_dict_pre_hooks"):
            return  # one around another, which is watched itself; it may have as few attributes as it likes
        optimizer.register_state_dict_pre_hook(_refuse_distributed)


def _refuse_distributed(optimizer: Optimizer) -> None:
    """See [Note: optimizers]."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.checkpoint"):
            raise UserError(
                "torch.distributed.checkpoint would keep one rank's part of its states",
                where=type(optimizer).__name__,
                allowed="lowband.Checkpointer; on each rank a file of its optimizer.state_dict()",
            )
        frame = frame.f_back  # type: ignore[assignment]


register_optimizer_step_pre_hook(_watch)
