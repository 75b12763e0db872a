"""A sharded module and its optimizer as logical tensors under the module's own names.

A logical tensor is the tensor that a single device would have without sharding. A rank holds a range of each
flattened parameter and of each per-element optimizer state, and all of the others (step counts, buffers).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lowband.engine.api import engine_of
from lowband.engine.checkpoint.manifest import Content, Group, Number, Saved
from lowband.engine.shard_parameter import ShardOf
from lowband.engine.state_dict import own_state_dict
from lowband.errors import UserError


@dataclass(frozen=True)
class Piece:
    """The part of a logical tensor that this rank holds.

    local:   this rank's values, 1D
    start:   index of the first value in the flattened logical tensor
    shape:   shape of the logical tensor
    sharded: whether each rank holds a range; otherwise every rank holds the whole tensor
    writes:  whether this rank writes its values into a checkpoint
    """

    local: torch.Tensor
    start: int
    shape: tuple[int, ...]
    sharded: bool
    writes: bool

    @property
    def saved(self) -> Saved:
        """The logical tensor's manifest entry, without chunks."""
        dtype = str(self.local.dtype).removeprefix("torch.")
        return Saved(dtype=dtype, shape=self.shape, sharded=self.sharded)

    def to_cpu(self) -> "Piece":
        """A copy on the CPU, which training does not change."""
        return replace(self, local=self.local.to("cpu", copy=True))

    def like(self, local: torch.Tensor) -> "Piece":
        """The same range of another tensor that is sharded in the same way."""
        return replace(self, local=local)


@dataclass(frozen=True)
class Logical:
    """All state of a module and its optimizer that a checkpoint holds.

    shards: the optimizer's parameters by name
    pieces: by name in the manifest, without the random number generators' states, which belong to ranks
    """

    shards: dict[str, nn.Parameter]
    parameters: dict[str, Piece]
    pieces: dict[str, Piece]
    numbers: dict[str, Number]
    groups: tuple[Group, ...]
    optimizer: str

    @classmethod
    def of(cls, module: nn.Module, optimizer: torch.optim.Optimizer) -> "Logical":
        """Raises UserError for an optimizer whose parameters or states cannot be saved.

        The values of `pieces` are views: training changes them.
        """
        shards, parameters = {}, {}
        for name, shard, piece in _parameters(module):
            shards[name], parameters[name] = shard, piece
        pieces = {f"model.{name}": piece for name, piece in parameters.items()}
        numbers: dict[str, Number] = {}
        for name, shard in shards.items():
            for key, value in optimizer.state.get(shard, {}).items():
                full = state_name(key, name)
                if isinstance(value, Number):
                    numbers[full] = value
                else:
                    pieces[full] = _state_piece(full, value, shard, parameters[name])
        for name, buffer in buffers(module).items():
            pieces[name] = _whole(buffer, writes=dist.get_rank() == 0)
        return cls(shards, parameters, pieces, numbers, _groups(shards, optimizer), _full_name(optimizer))

    def content(self, step: int) -> Content:
        tensors = {name: piece.saved for name, piece in self.pieces.items()}
        return Content(
            step=step, optimizer=self.optimizer, groups=self.groups, tensors=tensors, numbers=self.numbers
        )


def state_name(key: Any, parameter: str) -> str:
    """Name of an optimizer state in the manifest. Raises UserError if its key is not an identifier."""
    if not isinstance(key, str) or not key.isidentifier():  # no dot, so that the name can be split
        raise UserError(f"state {key!r} cannot be saved", where="optimizer", allowed="names as in Python")
    return f"optimizer.{key}.{parameter}"


def state_of(full: str) -> tuple[str, str] | None:
    """(key, name of the parameter) from the manifest name of an optimizer state; None for other names."""
    kind, _, rest = full.partition(".")
    key, _, parameter = rest.partition(".")
    return (key, parameter) if kind == "optimizer" else None


def buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every persistent buffer, by name in the manifest."""
    kept = own_state_dict(module)
    named = module.named_buffers(remove_duplicate=False)
    return {f"buffer.{name}": buffer for name, buffer in named if name in kept}


def random_states(module: nn.Module) -> dict[str, Piece]:
    """States of this rank's random number generators, by name in the manifest."""
    device, rank = engine_of(module).device, dist.get_rank()
    states = {f"rng.cpu.{rank}": _whole(torch.get_rng_state(), writes=True)}
    if device.type == "cuda":
        states[f"rng.cuda.{rank}"] = _whole(torch.cuda.get_rng_state(device), writes=True)
    return states


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Piece]]:
    """(name, optimizer shard, this rank's piece) for every parameter."""
    engine = engine_of(module)
    engine.put_shards()
    levels = engine.topology.levels
    for unit in engine.units:
        # Beyond the optimizer's level ranks hold copies, so only the first group writes.
        writes = engine.topology.rank < levels.size(unit.scheme.optim)
        for shard in unit.shards:
            whole: ShardOf = shard.shard_of
            local = shard.detach()[: whole.stop - whole.start]  # without the padding behind
            yield (
                whole.name,
                shard,
                Piece(local, whole.start, tuple(whole.shape), sharded=True, writes=writes),
            )


def _state_piece(full: str, value: Any, shard: nn.Parameter, parameter: Piece) -> Piece:
    if type(value) is not torch.Tensor:
        raise UserError(
            f"'{full}' is of type {type(value).__name__}",
            where="optimizer",
            allowed="plain tensors and numbers",
        )
    if value.shape == shard.shape:
        return parameter.like(value.detach()[: parameter.local.numel()])
    return _whole(value, writes=dist.get_rank() == 0)


def _whole(value: torch.Tensor, writes: bool) -> Piece:
    return Piece(value.detach().reshape(-1), 0, tuple(value.shape), sharded=False, writes=writes)


def _groups(shards: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> tuple[Group, ...]:
    names = {id(shard): name for name, shard in shards.items()}
    groups = []
    for group in optimizer.param_groups:
        if any(id(parameter) not in names for parameter in group["params"]):
            raise UserError(
                "has a parameter that does not belong to the module",
                where="optimizer",
                allowed="those of module.parameters() after lowband.shard",
            )
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append(Group(parameters=tuple(names[id(p)] for p in group["params"]), options=options))
    return tuple(groups)


def _full_name(optimizer: torch.optim.Optimizer) -> str:
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
