"""Put a checkpoint's values in place, after all of them have been read and checked to fit."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowband.engine.checkpoint import extra_states
from lowband.engine.checkpoint.logical_tensors import (
    Logical,
    Piece,
    buffers,
    in_flight,
    is_of_device,
    sync_pieces,
    unmarked,
)
from lowband.engine.checkpoint.manifest import Manifest, of_slice
from lowband.engine.checkpoint.names import STEPS, state_of
from lowband.engine.checkpoint.rank_file import read_range
from lowband.engine.passes.engine import engine_of
from lowband.engine.transport.meeting import Meeting, Tick
from lowband.engine.units.slice_of import SliceOf
from lowband.engine.units.turns import all_in_memory
from lowband.engine.units.waiting import check_reduced
from lowband.errors import UserError


@dataclass(frozen=True)
class Wanted:
    """What this rank needs of a tensor: elements `start` to `start + count` of it, or of its slice of it."""

    start: int
    count: int
    slice: SliceOf | None = None


@contextmanager
def in_memory(
    meeting: Meeting, module: nn.Module, optimizer: torch.optim.Optimizer, writes: bool
) -> Iterator[None]:
    """What lies on a disk, once all ranks could read theirs. writes: it may change"""
    with ExitStack() as stack:
        if disks := engine_of(module).on_disk():
            present = all_in_memory(disks, optimizer, writes)
            meeting.agree(lambda: stack.enter_context(present))
        yield


def check_none_waits(module: nn.Module, where: str) -> None:
    """Raise UserError while gradients wait for a backward, which would add them to those of other weights."""
    check_reduced(
        engine_of(module).shards,
        where,
        "would be added to those of the loaded weights",
        allowed="zero_grad() first, which discards them",
    )


def ranges(manifest: Manifest, here: Logical, random: dict[str, Piece]) -> dict[str, Wanted]:
    """What this rank needs of each tensor, by name."""
    needed = {}
    for name, saved in manifest.tensors.items():
        if saved.sharded:
            state = state_of(name)
            piece = here.parameters[state[1]] if state else (here.pieces | here.updates)[name]
            needed[name] = Wanted(piece.start, piece.local.numel(), piece.slice)
        elif not name.startswith("rng.") or name in random:
            needed[name] = Wanted(0, saved.numel)
    return needed


def read(
    folder: Path,
    manifest: Manifest,
    name: str,
    wanted: Wanted,
    tick: Tick,
) -> torch.Tensor:
    """This rank's range of a tensor, 1D, on the CPU, also if other tensor ranks than today's saved it.

    manifest: with the slices of all tensor ranks
    """
    saved, here, start, count = manifest.tensors[name], wanted.slice, wanted.start, wanted.count
    places = range(1 if saved.cut is None else saved.cut.ranks)
    if here is not None and saved.cut is not None and saved.cut.of(here.place) == here:
        return read_range(folder, manifest.tensors[of_slice(name, here.place)], start, count, tick)
    if here is None and saved.cut is None:
        return read_range(folder, saved, start, count, tick)
    slices = [
        read_range(folder, entry, 0, entry.numel, tick).view(entry.shape)
        for entry in (manifest.tensors[of_slice(name, place)] for place in places)
    ]
    whole = slices[0] if saved.cut is None else saved.cut.of(0).join(slices)
    mine = whole if here is None else here.cut(whole)
    return mine.reshape(-1)[start : start + count].clone()


def check_values(
    values: dict[str, torch.Tensor], random: dict[str, Piece], device: torch.device, folder: Path
) -> None:
    """Raise UserError for what is not a generator's state, or a module's extra state."""
    extra_states.check_readable(values, folder)
    for name in random:
        try:
            torch.Generator(device if is_of_device(name) else "cpu").set_state(values[name])
        except RuntimeError:
            raise UserError(f"'{name}' is not a generator's state", where=folder) from None


def new_states(manifest: Manifest, here: Logical) -> dict[str, torch.Tensor]:
    """New tensors for states that only the checkpoint has, by name in the manifest; padding is zeros."""
    options = {name: group.options for group in manifest.groups for name in group.parameters}
    made = {}
    for full, saved in manifest.tensors.items():
        state = state_of(full)
        if state is None or full in here.pieces:
            continue
        shard, dtype = here.shards[state[1]], saved.torch_dtype
        if saved.sharded:
            zeros = torch.zeros_like(shard, dtype=dtype, requires_grad=False)
            made[full] = zeros.as_subclass(torch.Tensor)
        else:
            # A step count; fused and capturable optimizers keep theirs on the device.
            of_group = options.get(state[1], {})
            is_on_device = of_group.get("fused") or of_group.get("capturable")
            made[full] = torch.empty(saved.shape, dtype=dtype, device=shard.device if is_on_device else "cpu")
    return made


def overwrite(
    manifest: Manifest,
    values: dict[str, torch.Tensor],
    made: dict[str, torch.Tensor],
    here: Logical,
    random: dict[str, Piece],
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
) -> None:
    """Fill everything in place.

    values: this rank's range of each tensor (see `ranges`), 1D, on the CPU
    made:   the result of `new_states`
    """
    for name, piece in here.parameters.items():
        here.shards[name].zero_()  # the padding, too: a quantized wire has it in a block with weights
        piece.local.copy_(values[f"model.{name}"])
    for name, buffer in buffers(module).items():
        buffer.copy_(values[name].view(buffer.shape))
    extra_states.put(module, values)
    if (replicas := engine_of(module).replicas) is not None:
        if STEPS in manifest.tensors:
            size = engine_of(module).axis.levels.size(replicas.sync.beyond)
            replicas.resume(int(values[STEPS]), in_flight(manifest, replicas))
            for name, piece in sync_pieces(replicas, size).items():
                if name != STEPS:
                    piece.local.copy_(values[name])
        else:
            replicas.begin()
    for group, saved in zip(optimizer.param_groups, manifest.groups, strict=True):
        for key, value in saved.options.items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    _overwrite_states(manifest, values, made, here, optimizer)
    for name in random:
        if is_of_device(name):
            torch.cuda.set_rng_state(values[name], device)
        else:
            torch.set_rng_state(values[name])


def _overwrite_states(
    manifest: Manifest,
    values: dict[str, torch.Tensor],
    made: dict[str, torch.Tensor],
    here: Logical,
    optimizer: torch.optim.Optimizer,
) -> None:
    """Give the optimizer exactly the states that the checkpoint has."""
    states: dict[str, dict[str, Any]] = {name: {} for name in here.shards}
    for full, saved in manifest.tensors.items():
        state = state_of(full)
        if state is None:
            continue
        key, name = state
        value = made[full] if full in made else unmarked(optimizer.state[here.shards[name]][key])
        part = value[: values[full].numel()] if saved.sharded else value  # without the padding behind
        part.copy_(values[full].view(part.shape))
        states[name][key] = value
    for full, number in manifest.numbers.items():
        key, name = state_of(full) or ("", "")
        states[name][key] = number
    for name, shard in here.shards.items():
        optimizer.state.pop(shard, None)
        if states[name]:
            optimizer.state[shard] = states[name]
