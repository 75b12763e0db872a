"""What must hold before a module is sharded: schemes that fit, and the same inputs on all ranks."""

import hashlib
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import nn

from lowband.engine.backend import backend
from lowband.engine.transport.axis import Axis
from lowband.engine.transport.everyone import everyones, to_send, warn
from lowband.errors import UserError
from lowband.spec.mesh import Levels
from lowband.spec.scheme import Scheme

T = TypeVar("T")


def check_schemes(scheme: Scheme, of_units: Sequence[Scheme], levels: Levels) -> None:
    """Raises UserError unless all schemes fit the levels, and those of units the module's."""
    for placed in (scheme, *of_units):
        placed.check(levels)
        if placed.sync != scheme.sync:
            raise UserError(
                "a unit's own placement has another sync than the module's",
                where=f"scheme '{placed.name}'",
                allowed=f"the sync of scheme '{scheme.name}' for every unit",
            )


def check_same_sharding(
    module: nn.Module,
    scheme: Scheme,
    placed: Sequence[tuple[str, Scheme]],
    more: Mapping[str, object],
    axis: Axis,
    of_experts: tuple[Sequence[nn.Parameter], int],
) -> None:
    """Raises UserError, on every rank, if ranks differ in scheme or `more`, or along the axis in the module.
    Warns if buffers differ where ranks have nothing of their own to keep in them.

    placed:     each unit's name and scheme
    axis:       data, whose first rank others are compared with; others may have another stage of a pipeline
    of_experts: parameters that fewer ranks have in common, and the first of these ranks; of a stage without
                any, none and the first along the axis
    """
    if is_alone():
        return
    first = axis.ranks[0]
    inputs = {f"{key} in its scheme": value for key, value in scheme.model_dump(mode="json").items()}
    own = [(name, of_unit.model_dump()) for name, of_unit in placed if of_unit != scheme]
    experts, first_alike = of_experts
    facts = facts_of(module, [name for name, _ in placed], without=experts)
    check_same({**inputs, **more})
    check_same({"units with their own placement": own, **facts}, first)
    check_same({"sum of experts' initial weights (as integers)": _sum_of(experts)}, first_alike)
    if not any(name in axis.beside for name in ("context", "expert")):
        values = [(name, buffer) for name, buffer in module.named_buffers() if not buffer.is_meta]
        _compare_buffers({name: sum(map(_sum_of_bits, dense_parts(b))) for name, b in values}, first)


def _compare_buffers(sums: Mapping[str, int], first: int) -> None:
    """sums: of this rank's bits; first: the rank that this one is compared with"""
    everybody = everyones((first, dict(sums)))
    for rank, (other, theirs) in enumerate(everybody):
        for name in (name for name, sum_ in everybody[other][1].items() if theirs.get(name) != sum_):
            warn(
                f"buffer '{name}' of rank {rank} differs from that of rank {other}: they compute other "
                "values with the same weights"
            )
            return


def check_same(mine: Mapping[str, object], first: int = 0) -> tuple[str, ...]:
    """The host names of all ranks. Raises UserError, on every rank, if ranks differ in a key's value.

    first: the rank that this one is compared with
    """
    everybody = everyones((socket.gethostname(), first, dict(mine)))
    for rank, (host, other, theirs) in enumerate(everybody):
        for what, value in everybody[other][2].items():
            if theirs[what] != value:
                raise UserError(
                    f"rank {rank} on {host} differs from rank {other} in {what}: {theirs[what]}, not {value}"
                )
    return tuple(host for host, *_ in everybody)


def is_alone() -> bool:
    """Whether there are no other ranks to compare with: one rank, or torch's fake group."""
    return dist.get_world_size() == 1 or backend() == "fake"


def agreed(work: Callable[[], T]) -> T:
    """Do it, and return its result. If it fails on some ranks, they raise its error, and the others that of
    the lowest of them."""
    error, done = None, list[T]()
    try:
        done.append(work())
    except Exception as raised:  # the other ranks would wait for this one
        error = raised
    try:
        errors = [] if is_alone() else everyones(None if error is None else to_send(error))
    except Exception as lost:
        if error is None:
            raise
        raise error from lost  # without the others this one still has its own to tell
    for each in (error, *errors):
        if each is not None:
            raise each
    return done[0]


def facts_of(
    module: nn.Module, units: Iterable[str], without: Sequence[nn.Parameter] = ()
) -> dict[str, object]:
    """The properties of a module that all ranks must share before sharding: shapes, units and values.

    Values are summed as integers, so the order does not matter; different values may have the same sum.
    without: parameters whose values ranks do not share
    """
    apart = set(without)
    shapes = [
        (name, tuple(p.shape), str(p.dtype), p.requires_grad, p.is_meta)
        for name, p in module.named_parameters(remove_duplicate=False)
    ]
    return {
        "list of parameters (sha256)": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
        "division into units (sha256)": hashlib.sha256(repr(list(units)).encode()).hexdigest()[:16],
        "sum of initial weights (as integers)": _sum_of(p for p in module.parameters() if p not in apart),
    }


def dense_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """What a tensor consists of: several if it is nested or sparse."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.layout == torch.strided:
        return [tensor]
    found = tensor.to_sparse_coo().coalesce()
    return [found.indices(), found.values()]


def _sum_of(parameters: Iterable[nn.Parameter]) -> int:
    return sum(_sum_of_bits(p) for p in parameters if not p.is_meta)


def _sum_of_bits(parameter: torch.Tensor) -> int:
    flat = parameter.detach().reshape(-1)
    bits = flat.view(torch.int32 if flat.element_size() == 4 else torch.uint8)
    return int(bits.sum(dtype=torch.int64).item())
