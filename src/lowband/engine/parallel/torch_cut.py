"""Modules that the user has cut with torch's `parallelize_module`: their parameters are DTensors.

torch keeps what it does in their forwards and backwards, in its own process groups; none of it is counted.
lowband takes their local tensors as any tensor rank's slices: schemes place them on the data axis, norms and
checkpoints know of which whole they are a part.
"""

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lowband.engine.collectives.activations import Along
from lowband.engine.transport.axis import Axis
from lowband.engine.transport.consistency import check_same, facts_of, is_alone
from lowband.engine.transport.topology import Topology
from lowband.engine.units.changes import check_no_hooks
from lowband.engine.units.own_attributes import keep_attributes
from lowband.engine.units.parts import of_part
from lowband.engine.units.seen_as import SeenAs, local_of
from lowband.engine.units.slice_of import SliceOf
from lowband.errors import UserError

NOT_COUNTED = "tensor"  # what a ledger says then


def take_over(module: nn.Module, topology: Topology) -> None:
    """Replace a module's DTensors by their local tensors, which the module sees as DTensors when it computes.

    Raises UserError, before anything is replaced, for DTensors that do not lie on the topology's tensor axis,
    and, on every rank, if parameters that tensor ranks have whole are not the same on them.
    """
    cut = {name: p for name, p in module.named_parameters() if _is_dtensor(p)}
    if not cut:
        return
    axis = topology.along("tensor")
    if any(of_part(child) is not None for child in module.modules()):
        what = "parts are cut by lowband.parallelize, others by torch's parallelize_module"
        raise UserError(what, where=type(module).__name__, allowed="one of both")
    for name, parameter in cut.items():
        check_no_hooks(name, parameter, type(module).__name__)
    slices = {name: _slice_of(name, parameter, axis) for name, parameter in cut.items()}
    if not is_alone():
        wholes = [p for name, p in module.named_parameters() if slices.get(name) is None]
        check_same(facts_of(nn.ParameterList(map(_local, wholes)), ()), axis.ranks[0])
    along = Along(axis)
    along.ledger.not_counted.add(NOT_COUNTED)
    places: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for child in module.modules():
        child._lowband_tensor = along  # type: ignore[assignment]
        for attribute, parameter in child._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((child, attribute))
    for name, parameter in cut.items():
        local = _local(parameter)
        keep_attributes(parameter, local)
        local.seen_as = SeenAs.of(parameter)  # type: ignore[attr-defined]
        if slices[name] is not None:
            local.slice_of = slices[name]  # type: ignore[attr-defined]
        for child, attribute in places[parameter]:
            child._parameters[attribute] = local


def _local(parameter: nn.Parameter) -> nn.Parameter:
    """A DTensor's local tensor as a parameter of its own; any other parameter itself."""
    found = local_of(parameter)
    return parameter if found is None else nn.Parameter(found.detach(), parameter.requires_grad)


def _is_dtensor(parameter: torch.Tensor) -> bool:
    """Without importing DTensor, which takes long."""
    return is_traceable_wrapper_subclass(parameter) and type(parameter).__name__ == "DTensor"


def _slice_of(name: str, parameter: Any, axis: Axis) -> SliceOf | None:
    """Of which whole a DTensor's local tensor is a part; None if it is whole."""
    mesh, placements, ranks = parameter.device_mesh, parameter.placements, axis.ranks
    if mesh.ndim != 1 or tuple(mesh.mesh.tolist()) != tuple(ranks):
        over = f"over ranks {mesh.mesh.tolist()}, and this rank's tensor axis is {list(ranks)}"
        raise UserError(
            f"'{name}' is a DTensor {over}",
            where="lowband.shard",
            allowed="parallelize_module on the axis of Topology(..., Axes(tensor=...)), without fully_shard",
        )
    [placement] = placements
    if placement.is_replicate():
        return None
    if not placement.is_shard():
        raise UserError(f"'{name}' is a DTensor placed as {placement}", allowed="Shard and Replicate")
    if parameter.shape[placement.dim] % len(ranks):
        what = f"'{name}' has {parameter.shape[placement.dim]} values along dimension {placement.dim}"
        raise UserError(f"{what}, which cannot be divided over tensor {len(ranks)}", where="lowband.shard")
    return SliceOf(parameter.shape, placement.dim, 1, axis.place, len(ranks))
