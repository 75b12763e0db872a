"""A sharded module and its optimizer as logical tensors under the module's own names.

A logical tensor is the tensor that a single device would have without sharding. A rank holds a range of each
flattened parameter and of each per-element optimizer state, and all of the others (step counts, buffers).

What replicas that meet seldom share, `sync`, is there once: the anchor, the outer optimizer's momentum, the
number of steps since the period began and, of exchanges that have not arrived, the update that they bring.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from lowband.engine.arguments import refused
from lowband.engine.checkpoint.extra_states import extra_states
from lowband.engine.checkpoint.manifest import Content, Cut, Group, Manifest, Number, Saved, of_slice
from lowband.engine.checkpoint.names import STEPS, of_replica, state_name
from lowband.engine.passes.engine import Engine, engine_of
from lowband.engine.replicas.exchange import Exchange
from lowband.engine.replicas.replicas import Replicas
from lowband.engine.units.absent import StateOnDisk
from lowband.engine.units.shard_grad import ShardValues
from lowband.engine.units.shard_of import ShardOf
from lowband.engine.units.slice_of import SliceOf
from lowband.engine.units.state_dict import own_buffers, refuse_sparse
from lowband.engine.units.unit import Unit
from lowband.errors import UserError
from lowband.spec.partition import intersect


@dataclass(frozen=True)
class Piece:
    """The part of a logical tensor that this rank holds.

    local:   this rank's values, 1D
    start:   index of the first value in the flattened logical tensor
    shape:   shape of the logical tensor
    sharded: whether each rank holds a range; otherwise every rank holds the whole tensor
    writes:  whether this rank writes its values into a checkpoint
    slice:   what the tensor is this rank's slice of, if tensor ranks divide it; then `shape` is the slice's
    """

    local: torch.Tensor
    start: int
    shape: tuple[int, ...]
    sharded: bool
    writes: bool
    slice: SliceOf | None = None

    @property
    def saved(self) -> Saved:
        """The logical tensor's manifest entry, without chunks."""
        dtype = str(self.local.dtype).removeprefix("torch.")
        of = self.slice
        cut = None if of is None else Cut(shape=tuple(of.shape), dim=of.dim, parts=of.parts, ranks=of.ranks)
        return Saved(dtype=dtype, shape=self.shape, sharded=self.sharded, cut=cut)

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
    pieces: by name in the manifest of the first replica, without the random number generators' states, which
            belong to ranks
    replica, replicas: this rank's, and how many there are; 0 and 1 without sync
    updates: like what a checkpoint has of parameters whose exchange has not arrived, by its name there
    """

    shards: dict[str, nn.Parameter]
    parameters: dict[str, Piece]
    pieces: dict[str, Piece]
    numbers: dict[str, Number]
    groups: tuple[Group, ...]
    optimizer: str
    replica: int
    replicas: int
    updates: dict[str, Piece]

    @classmethod
    def of(cls, module: nn.Module, optimizer: torch.optim.Optimizer) -> "Logical":
        """Raises UserError for an optimizer whose parameters or states cannot be saved.

        The values of `pieces` are views: training changes them.
        """
        if optimizer is None:
            allowed = "the optimizer; full_state_dict, save_safetensors for weights alone"
            raise UserError("no optimizer is given", where="lowband.Checkpointer", allowed=allowed)
        if not (hasattr(optimizer, "state") and hasattr(optimizer, "param_groups")):
            raise refused("lowband.Checkpointer", "optimizer", optimizer, "one torch.optim.Optimizer")
        engine = engine_of(module)
        engine.axis.check_alone("Checkpointer", known=engine.other_ranks)
        shards, parameters = {}, {}
        for name, shard, piece in _parameters(module):
            shards[name], parameters[name] = shard, piece
        size = engine.axis.levels.size(engine.collectives.scheme.level("replica"))
        place, own = engine.axis.place, names_of(engine, is_first=True)
        is_first_of_replica = place % size == 0 and is_first_of_tensor(engine)
        pieces = {f"model.{name}": piece for name, piece in parameters.items()}
        numbers: dict[str, Number] = {}
        for name, shard in shards.items():
            for key, value in optimizer.state.get(shard, {}).items():
                full = state_name(key, name)
                if isinstance(value, Number):
                    numbers[full] = value
                else:
                    is_first = is_first_of_replica and name in own
                    pieces[full] = _state_piece(full, value, shard, parameters[name], is_first)
        pieces |= {name: _whole(each, writes=is_first_of_replica) for name, each in buffers(module).items()}
        for name, state in extra_states(module).items():
            pieces[name] = _whole(state, writes=engine.is_first)
        updates: dict[str, Piece] = {}
        if engine.replicas is not None:
            engine.axis.check_alone("Checkpointer of replicas that meet seldom")
            pieces |= sync_pieces(engine.replicas, size)
            for each in engine.replicas.exchanges:
                updates |= _by_parameter(each.unit, each.update_name, each.weights, each.range, writes=False)
        groups, kind = _groups(shards, optimizer), _full_name(optimizer)
        replica, replicas = place // size, len(engine.axis.ranks) // size
        return cls(shards, parameters, pieces, numbers, groups, kind, replica, replicas, updates)

    def content(self, step: int) -> Content:
        tensors = {
            of_slice(of_replica(name, replica), place): piece.saved
            for replica in range(self.replicas)
            for name, piece in self.pieces.items()
            for place in range(1 if piece.slice is None else piece.slice.ranks)
        }
        return Content(
            step=step, optimizer=self.optimizer, groups=self.groups, tensors=tensors, numbers=self.numbers
        )


def names_of(engine: Engine, is_first: bool = False) -> set[str]:
    """Names in the whole model of a rank's parameters. is_first: but for those that an earlier stage has"""
    units = (unit for unit in engine.units if not is_first or unit.tied is None or unit.tied.is_first)
    return {shard.shard_of.name for unit in units for shard in unit.shards}  # type: ignore[attr-defined]


def is_first_of_tensor(engine: Engine) -> bool:
    return engine.tensor is None or engine.tensor.axis.is_first


def buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every persistent buffer, by name in the manifest. Raises UserError for one that is sparse or nested."""
    found = own_buffers(module)
    for name, buffer in found.items():
        refuse_sparse(name, buffer, where="lowband.Checkpointer")
    return {f"buffer.{name}": buffer for name, buffer in found.items()}


def random_states(module: nn.Module) -> dict[str, Piece]:
    """States of this rank's random number generators, by name in the manifest."""
    device, axis = engine_of(module).device, engine_of(module).axis
    place = ".".join(filter(None, (str(axis.rank), axis.beside)))
    states = {f"rng.cpu.{place}": _whole(torch.get_rng_state(), writes=True)}
    if device.type == "cuda":
        states[f"rng.cuda.{place}"] = _whole(torch.cuda.get_rng_state(device), writes=True)
    return states


def random_in(manifest: Manifest, module: nn.Module, ranks: int) -> dict[str, Piece]:
    """Those that a checkpoint has for this rank: none where its ranks were others, or lay along other axes.

    ranks: of this job. Over other axes, ranks that are to draw the same numbers would draw different ones, or
           the other way about
    """
    mine = random_states(module)
    layout = next(iter(mine)).split(".", 3)[3:]
    theirs = [name.split(".", 3)[3:] for name in manifest.tensors if name.startswith("rng.")]
    if len(manifest.files) != ranks or any(each != layout for each in theirs):
        return {}
    return {n: piece for n, piece in mine.items() if not is_of_device(n) or n in manifest.tensors}


def is_of_device(name: str) -> bool:
    """Whether it is a GPU's random state: a checkpoint that was saved on a CPU has none."""
    return name.startswith("rng.cuda.")


def _parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter, Piece]]:
    """(name, optimizer shard, this rank's piece) for every parameter."""
    engine = engine_of(module)
    engine.put_shards()
    for unit in engine.units:
        levels = unit.levels
        # Beyond the optimizer's level a replica's ranks hold copies, so only its first group writes.
        first = unit.collectives.axis.place % levels.size(unit.scheme.level("replica"))
        is_in_first = first < levels.size(unit.scheme.optim)
        for shard in unit.shards:
            whole: ShardOf = shard.shard_of
            is_cut = whole.slice_of is not None and whole.slice_of.axis == "tensor"
            writes = is_in_first and (is_cut or is_first_of_tensor(engine))
            writes = writes and (unit.tied is None or unit.tied.is_first)
            local = shard.detach().as_subclass(torch.Tensor)[
                : whole.stop - whole.start
            ]  # without the padding behind
            yield (
                whole.name,
                shard,
                Piece(local, whole.start, tuple(whole.shape), True, writes, whole.slice_of),
            )


def sync_pieces(replicas: Replicas, size: int) -> dict[str, Piece]:
    """What exchanges hold, by name; waits for those on their way. size: ranks in a replica

    Raises UserError while only some of several optimizers have stepped.
    """
    if not replicas.is_between_steps:
        raise UserError(
            "some parameters have been stepped and others have not",
            where="Checkpointer",
            allowed="between the steps of all optimizers",
        )
    pieces = {STEPS: _whole(torch.tensor(replicas.steps), writes=replicas.axis.is_first)}
    for each in replicas.exchanges:
        for key, values, of_unit, is_shared in each.held():
            writes = replicas.axis.place < size or not is_shared
            pieces |= _by_parameter(each.unit, key, values, of_unit, writes)
    return pieces


def in_flight(manifest: Manifest, replicas: Replicas) -> list[Exchange]:
    """The units whose exchange had not arrived when a checkpoint was saved.

    Raises UserError if that holds for some of a unit's parameters only: the checkpoint has other units.
    """
    moving = []
    for each in replicas.exchanges:
        prefix = f"{each.update_name}."
        names = [prefix + shard.shard_of.name for shard in each.unit.shards]  # type: ignore[attr-defined]
        found = [name in manifest.tensors for name in names]
        if any(found) and not all(found):
            raise UserError(
                f"the exchange of '{names[found.index(True)].removeprefix(prefix)}' had not arrived, that of "
                f"'{names[found.index(False)].removeprefix(prefix)}' in the same unit had",
                where="checkpoint",
                allowed="the units and fragments that it was saved with",
            )
        if any(found):
            moving.append(each)
    return moving


def _by_parameter(
    unit: Unit, key: str, values: torch.Tensor, of_unit: tuple[int, int], writes: bool
) -> dict[str, Piece]:
    """The parts of a unit's range by `key.NAME` of their parameters. values: 1D, of that range"""
    found = {}
    for shard, place in zip(unit.shards, unit.layout.ranges(), strict=True):
        whole: ShardOf = shard.shard_of  # type: ignore[attr-defined]
        a, b = intersect(place, of_unit)
        first, local = min(a, place[1]) - place[0], values[a - of_unit[0] : b - of_unit[0]]
        found[f"{key}.{whole.name}"] = Piece(local, first, tuple(whole.shape), True, writes)
    return found


def _state_piece(full: str, value: Any, shard: nn.Parameter, parameter: Piece, is_first: bool) -> Piece:
    """is_first: whether this rank writes a tensor of which every rank of its replica has the whole"""
    value = unmarked(value)
    if type(value) not in (torch.Tensor, StateOnDisk):
        raise UserError(
            f"'{full}' is of type {type(value).__name__}",
            where="optimizer",
            allowed="plain tensors and numbers",
        )
    if value.shape == shard.shape:
        return parameter.like(value.detach()[: parameter.local.numel()])
    return _whole(value, writes=is_first)


def unmarked(state: Any) -> Any:
    """A state that an optimizer made like a shard, or of its gradient, in plain."""
    return state.as_subclass(torch.Tensor) if isinstance(state, ShardValues) else state


def _whole(value: torch.Tensor, writes: bool) -> Piece:
    return Piece(value.detach().reshape(-1), 0, tuple(value.shape), sharded=False, writes=writes)


def _groups(shards: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer) -> tuple[Group, ...]:
    for key in optimizer.state:
        if not isinstance(key, torch.Tensor):
            raise UserError(
                f"its state {key!r} is of no parameter", where="optimizer", allowed="states of parameters"
            )
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
