"""An optimizer's `state_dict()` says which parts of parameters its states are of, so that those of another
rank or of whole parameters, which may have the same shapes or be broadcast to them, are not loaded.
"""

from typing import Any, NoReturn

import torch
from torch.optim.optimizer import Optimizer

from lowband.errors import UserError

# Key of a state_dict: for each parameter its name, the whole's shape, start and stop, place of its slice.
_PARTS = "lowband_parts"


def know_parts(optimizer: Optimizer) -> None:
    """Have its state_dicts say their parts. Called again it changes nothing."""
    hooks = getattr(optimizer, "_optimizer_state_dict_post_hooks", None)  # one around another may have none
    if hooks is not None and _note not in hooks.values():
        optimizer.register_state_dict_post_hook(_note)
        optimizer.register_load_state_dict_pre_hook(_check)


def _parts(optimizer: Optimizer) -> list[list[Any] | None]:
    found: list[list[Any] | None] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            of = getattr(parameter, "shard_of", None)
            place = None if of is None or of.slice_of is None else of.slice_of.place
            found.append(None if of is None else [of.name, list(of.shape), of.start, of.stop, place])
    return found


def _note(optimizer: Optimizer, state: dict[str, Any]) -> None:
    state[_PARTS] = _parts(optimizer)


def _check(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Raises UserError for states of other parts, or, where they say nothing of them, of other shapes."""
    saved, now = state.get(_PARTS), _parts(optimizer)
    if saved is not None and len(saved) == len(now):
        for theirs, mine in zip(saved, now, strict=True):
            if theirs != mine:
                _refuse(optimizer, f"the state is of {_said(theirs)}, and this rank has {_said(mine)}")
        return
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for place, parameter in enumerate(parameters):
        of = getattr(parameter, "shard_of", None)
        if of is None:
            continue
        for value in state["state"].get(place, {}).values():
            if not isinstance(value, torch.Tensor) or value.shape == parameter.shape:
                continue
            if value.ndim == 1 or (value.ndim and value.shape == of.shape):  # others are sums, as Adafactor's
                what = f"a state of shape {list(value.shape)} is not of this rank's part"
                _refuse(optimizer, f"{what} of '{of.name}'")


def _said(part: list[Any] | None) -> str:
    if part is None:
        return "a parameter that is no shard"
    name, shape, start, stop, _ = part
    return f"values {start} to {stop} of '{name}', shape {tuple(shape)}"


def _refuse(optimizer: Optimizer, what: str) -> NoReturn:
    raise UserError(
        what,
        where=f"load_state_dict() of {type(optimizer).__name__}",
        allowed="on each rank what its own state_dict() gave; for any scheme and ranks lowband.Checkpointer, "
        "lowband.load_peer_checkpoint",
    )
