"""What a checkpoint holds, put in place: called when all of it is known to fit and has been read."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowband.engine.logical import Logical, Piece, buffers, state_of
from lowband.engine.manifest import Manifest, Saved
from lowband.errors import UserError


def ranges(manifest: Manifest, here: Logical, random: dict[str, Piece]) -> dict[str, tuple[int, int]]:
    """(first element, number of elements) of what this rank needs of each tensor, by name."""
    needed = {}
    for name, saved in manifest.tensors.items():
        if saved.sharded:
            state = state_of(name)
            piece = here.parameters[state[1] if state else name.removeprefix("model.")]
            needed[name] = (piece.start, piece.local.numel())
        elif not name.startswith("rng.") or name in random:
            needed[name] = (0, saved.numel)
    return needed


def check_random(
    values: dict[str, torch.Tensor], random: dict[str, Piece], device: torch.device, folder: Path
) -> None:
    """Raise UserError if a state is not one that its random number generator takes."""
    for name in random:
        try:
            torch.Generator(device if _is_of_device(name) else "cpu").set_state(values[name])
        except RuntimeError:
            raise UserError(f"'{name}' is not a generator's state", where=folder) from None


def overwrite(
    manifest: Manifest,
    values: dict[str, torch.Tensor],
    here: Logical,
    random: dict[str, Piece],
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> None:
    """Fill everything in place. values: 1D, on the CPU, of the `ranges`."""
    for name, piece in here.parameters.items():
        piece.local.copy_(values[f"model.{name}"])
    for name, buffer in buffers(module).items():
        buffer.copy_(values[name].view(buffer.shape))
    for group, saved in zip(optimizer.param_groups, manifest.groups, strict=True):
        for key, value in saved.options.items():
            group[key] = tuple(value) if isinstance(group[key], tuple) else value
    _overwrite_states(manifest, values, here, optimizer)
    for name in random:
        if _is_of_device(name):
            torch.cuda.set_rng_state(values[name], device)
        else:
            torch.set_rng_state(values[name])


def _overwrite_states(
    manifest: Manifest, values: dict[str, torch.Tensor], here: Logical, optimizer: torch.optim.Optimizer
) -> None:
    """Give the optimizer the states that the checkpoint has, and no others."""
    states: dict[str, dict[str, Any]] = {name: {} for name in here.shards}
    group_of = {id(shard): group for group in optimizer.param_groups for shard in group["params"]}
    for full, saved in [*manifest.tensors.items(), *manifest.numbers.items()]:
        state = state_of(full)
        if state is None:
            continue
        key, name = state
        if not isinstance(saved, Saved):
            states[name][key] = saved
            continue
        shard = here.shards[name]
        value = optimizer.state.get(shard, {}).get(key)
        if value is None:
            value = _new_state(saved, shard, group_of.get(id(shard), {}))
        part = value[: values[full].numel()] if saved.sharded else value  # without the padding behind
        part.copy_(values[full].view(part.shape))
        states[name][key] = value
    for name, shard in here.shards.items():
        optimizer.state.pop(shard, None)
        if states[name]:
            optimizer.state[shard] = states[name]


def _new_state(saved: Saved, shard: nn.Parameter, group: dict[str, Any]) -> torch.Tensor:
    if saved.sharded:
        return torch.zeros_like(shard, dtype=saved.torch_dtype, requires_grad=False)
    # A step count, which fused and capturable optimizers keep on the device.
    is_on_device = group.get("fused") or group.get("capturable")
    return torch.empty(saved.shape, dtype=saved.torch_dtype, device=shard.device if is_on_device else "cpu")


def _is_of_device(name: str) -> bool:
    return name.startswith("rng.cuda.")
