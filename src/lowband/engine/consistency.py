"""Verify that all ranks were given the same inputs before their first collective."""

import hashlib
import socket
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from lowband.errors import UserError


def check_same(mine: Mapping[str, object]) -> tuple[str, ...]:
    """The host names of all ranks. Raises UserError, on every rank, if ranks differ in a key's value."""
    everybody: list[tuple[str, dict[str, object]] | None] = [None] * dist.get_world_size()
    dist.all_gather_object(everybody, (socket.gethostname(), dict(mine)))
    starts = [start for start in everybody if start is not None]
    for rank, (host, theirs) in enumerate(starts):
        for what, value in starts[0][1].items():
            if theirs[what] != value:
                raise UserError(
                    f"rank {rank} on {host} differs from rank 0 in {what}: {theirs[what]}, not {value}"
                )
    return tuple(host for host, _ in starts)


def is_alone() -> bool:
    """Whether there are no other ranks to compare with: one rank, or torch's fake group."""
    return dist.get_world_size() == 1 or dist.get_backend() == "fake"


def facts_of(module: nn.Module, units: Iterable[str]) -> dict[str, object]:
    """The properties of a module that all ranks must share before sharding: shapes, units and values.

    Values are summed as integers, so the order does not matter; different values may have the same sum.
    """
    shapes = [
        (name, tuple(p.shape), str(p.dtype), p.requires_grad)
        for name, p in module.named_parameters(remove_duplicate=False)
    ]
    return {
        "list of parameters (sha256)": hashlib.sha256(repr(shapes).encode()).hexdigest()[:16],
        "division into units (sha256)": hashlib.sha256(repr(list(units)).encode()).hexdigest()[:16],
        "sum of initial weights (as integers)": sum(_sum_of_bits(p) for p in module.parameters()),
    }


def _sum_of_bits(parameter: torch.Tensor) -> int:
    flat = parameter.detach().reshape(-1)
    bits = flat.view(torch.int32 if flat.element_size() == 4 else torch.uint8)
    return int(bits.sum(dtype=torch.int64).item())
