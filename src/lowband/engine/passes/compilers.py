"""What torch may not make of a sharded module: a program of one rank's part, or a graph of its backward.

torch.compile is no matter: see passes.hooks, [Note: compiler].
"""

import sys
from typing import NoReturn

import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from lowband.errors import UserError

_SCRIPT = "__prepare_scriptable__"  # torch.jit.script asks each module for it
_COMPILED_AUTOGRAD = "torch._dynamo.compiled_autograd"


def refuse_scripts(module: nn.Module) -> None:
    """Refuse torch.jit.script of a module and of its parts."""
    for each in module.modules():
        setattr(each, _SCRIPT, _Script(type(module).__name__))


def refuse_recording(where: str) -> None:
    """Raises UserError in a forward that torch.jit.trace, torch.export or make_fx records."""
    if torch.jit.is_tracing():
        _refuse("torch.jit.trace", where)
    if torch.compiler.is_exporting():
        _refuse("torch.export", where)
    if get_proxy_mode() is not None:
        _refuse("make_fx", where)


def refuse_compiled_autograd(where: str) -> None:
    """Raises UserError where a backward would be compiled: what the engine has autograd call at its end is
    lost, so that no shard would get its gradient.
    """
    compiled = sys.modules.get(_COMPILED_AUTOGRAD)  # importing it takes seconds
    if compiled is None:
        return
    will_be = compiled.compiled_autograd_enabled and torch.is_grad_enabled()
    if will_be or compiled.in_compiled_autograd_region:
        allowed = "torch.compile of its forward, or of a whole step"
        raise UserError("compiled autograd of a sharded module", where=where, allowed=allowed)


class _Script:
    def __init__(self, where: str) -> None:
        self._where = where

    def __call__(self) -> NoReturn:
        _refuse("torch.jit.script", self._where)


def _refuse(what: str, where: str) -> NoReturn:
    raise UserError(
        f"{what} of a sharded module would keep this rank's part only",
        where=where,
        allowed=f"{what} of a plain module with the values of lowband.full_state_dict",
    )
