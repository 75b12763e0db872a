"""What surroundings of a module must not do once it is sharded: add parameters, record it, average it.

[Note: newcomers] The optimizer would train a parameter that came in after sharding, but no rank would average
its gradient, so ranks would part without an error. Submodules without parameters may come and go:
torch.compile puts one around a block.
"""

from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from lowband.engine.passes.compilers import refuse_compiled_autograd, refuse_recording, refuse_scripts
from lowband.engine.units.unit import Unit
from lowband.errors import UserError

_RESIZE = "resize_token_embeddings"  # of Hugging Face's models


class Places:
    """Where a sharded module has parameters."""

    def __init__(self, module: nn.Module, units: Iterable[Unit]) -> None:
        """Check them before each forward of the module."""
        self._module = module
        self._known: dict[nn.Module, set[str]] = {}
        for owner, attribute in (place for unit in units for slot in unit.slots for place in slot):
            self._known.setdefault(owner, set()).add(attribute)
        module.register_forward_pre_hook(self._before_forward, prepend=True)
        refuse_scripts(module)
        for each in module.modules():
            if callable(getattr(each, _RESIZE, None)):
                setattr(each, _RESIZE, _Refused(_RESIZE, type(each).__name__))
            if isinstance(each, nn.RNNBase):
                each.flatten_parameters = _stay_in_place  # type: ignore[method-assign]

    def check(self) -> None:
        """Raises UserError for a parameter that came in after sharding. See [Note: newcomers]."""
        # By hand: `modules()` makes every name on the way.
        waiting, seen = [self._module], {self._module}
        while waiting:
            owner = waiting.pop()
            known = self._known.get(owner, ())
            for attribute, parameter in owner._parameters.items():
                if parameter is not None and attribute not in known:
                    self._refuse(owner, attribute)
            for child in owner._modules.values():
                if child is not None and child not in seen:
                    seen.add(child)
                    waiting.append(child)

    def _refuse(self, owner: nn.Module, attribute: str) -> None:
        prefix = next(name for name, child in self._module.named_modules() if child is owner)
        name = f"{prefix}.{attribute}".removeprefix(".")
        raise UserError(
            f"'{name}' came in after lowband.shard",
            where=type(self._module).__name__,
            allowed="submodules, adapters and parameters added before lowband.shard",
        )

    @torch._disable_dynamo
    def _before_forward(self, *_: Any) -> None:
        refuse_recording(where := type(self._module).__name__)
        refuse_compiled_autograd(where)
        self.check()


def _stay_in_place() -> None:
    """On a GPU torch's would give weights of recurrent layers other memory, which no update would reach."""


class _Refused:
    """A method that would make new parameters."""

    def __init__(self, name: str, where: str) -> None:
        self._name, self._where = name, where

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError(
            f"{self._name} after lowband.shard", where=self._where, allowed="before lowband.shard"
        )


def _refuse_around(around: nn.Module, _name: str, module: nn.Module | None) -> None:
    """Refuse DistributedDataParallel around a sharded module: it would compare and average shards."""
    if isinstance(around, DistributedDataParallel) and module is not None:
        for child in module.modules():
            if hasattr(child, "_lowband"):
                raise UserError(
                    "DistributedDataParallel around a sharded module would average shards",
                    where=type(child).__name__,
                    allowed="lowband.shard alone, which averages gradients; its scheme ddp",
                )


register_module_module_registration_hook(_refuse_around)
