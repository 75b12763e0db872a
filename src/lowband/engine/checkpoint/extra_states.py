"""What modules add to their state by `get_extra_state`, as tensors of bytes that `torch.load` reads without
running code.
"""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowband.engine.checkpoint.manifest import EXTRA
from lowband.errors import UserError


def extra_states(module: nn.Module) -> dict[str, torch.Tensor]:
    """uint8, 1D, by name in the manifest. Raises UserError for what could only be read by running code."""
    found = {}
    for name, each in _with_extra_state(module).items():
        state = each.get_extra_state()
        try:
            found[name] = _encoded(state)
            _decoded(found[name])
        except Exception:  # of pickle, torch and the objects in it
            raise UserError(
                f"its extra state, a {type(state).__name__}, could only be read back by running code",
                where=f"module '{name.removeprefix(EXTRA)}'",
                allowed="tensors, numbers, text, and lists and dicts of them",
            ) from None
    return found


def names(module: nn.Module) -> set[str]:
    """Those of `extra_states`, which are not made for this."""
    return set(_with_extra_state(module))


def check_readable(values: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Raise UserError unless `put` can read them. values: by name in the manifest, of any kind"""
    for name, value in values.items():
        if name.startswith(EXTRA):
            try:
                _decoded(value)
            except Exception:  # torch.load has one of many for bytes that are not its own
                raise UserError(f"'{name}' is no extra state of a module", where=folder) from None


def put(module: nn.Module, values: Mapping[str, torch.Tensor]) -> None:
    """Give the modules their extra states, which have been checked.

    Their tensors are on the CPU: rank 0's device may be another rank's.
    """
    for name, each in _with_extra_state(module).items():
        each.set_extra_state(_decoded(values[name]))


def _with_extra_state(module: nn.Module) -> dict[str, nn.Module]:
    """One that is in several places by the name of each: on other stages of a pipeline it has one of them."""
    return {
        f"{EXTRA}{name}": each
        for name, each in module.named_modules(remove_duplicate=False)
        if type(each).get_extra_state is not nn.Module.get_extra_state
    }


def _encoded(state: Any) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _decoded(state: torch.Tensor) -> Any:
    return torch.load(io.BytesIO(state.numpy().tobytes()), map_location="cpu", weights_only=True)
