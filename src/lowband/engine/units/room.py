"""Whether this process may take as much host memory as its shards will need, by what is certain beforehand.

Certain are master weights, averaged gradients and the copy of the weights that schemes place there; what an
optimizer will keep is not known yet, nor what other processes of the node will take. A run, which knows both,
is checked by run.room.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from lowband.cost.memory import MASTER_BYTES, STATE_BYTES, beyond_bytes
from lowband.engine.backend import backend
from lowband.engine.transport.everyone import everyones
from lowband.errors import UserError
from lowband.spec.free_memory import free_memory
from lowband.spec.mesh import Levels
from lowband.spec.partition import UnitLayout
from lowband.spec.scheme import Scheme
from lowband.spec.tiers import HOST, at

Placed = tuple[Sequence[nn.Parameter], Scheme, Levels]  # a unit's parameters, and over which ranks they lie


def check_room(units: Sequence[Placed], compute_dtype: torch.dtype, device: torch.device) -> None:
    """Raises UserError, on every rank, if on one of them the units' shards in host memory have no room.

    device: of the shards on the device. Parameters there are freed as these are made
    """
    scheme = next((scheme for _, scheme, _ in units if scheme.tiers), None)
    if scheme is None or backend() == "fake":
        return
    needed = _needed(units, compute_dtype.itemsize)
    given = (p for parameters, _, _ in units for p in parameters if device.type == p.device.type == "cpu")
    free = free_memory() + sum(p.nbytes for p in given)
    for there, has in everyones((needed, free)):
        if there > has:
            raise UserError(
                f"{there:,} bytes of states in a process's memory, where {has:,} are free",
                where=f"scheme '{scheme.name}'",
                allowed="a smaller module, more ranks",
            )


def _needed(units: Iterable[Placed], compute_bytes: int) -> int:
    needed = 0
    for parameters, scheme, levels in units:
        numel = UnitLayout.of([tuple(p.shape) for p in parameters], levels.world).numel
        held = beyond_bytes([numel], scheme, levels, compute_bytes, dict.fromkeys(("weights", "buffers"), 0))
        masters = held.get(at("optim", HOST), 0) * MASTER_BYTES // STATE_BYTES
        grads = held.get(at("grads", HOST), 0) if parameters[0].requires_grad else 0
        needed += masters + grads + held.get(at("weights", HOST), 0)
    return needed
