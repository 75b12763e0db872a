"""Copies of a rank's own shards between the device and another memory, each in the lane of that tier.

On a GPU they run behind the computation, so what the copy engine reads or fills there is pinned: gradients,
and one unit's new weights at a time. Master weights and the optimizer's states are not: the CPU uses them.
"""

from collections.abc import Generator, Sequence

import torch

from lowband.engine.transport.call import Call
from lowband.spec.step import FETCH, STASH
from lowband.spec.tiers import Tier

Copy = Generator[tuple[str, Sequence[torch.Tensor]], None, torch.Tensor]
HOST = torch.device("cpu")


def stash(call: Call, gradients: torch.Tensor, tier: Tier) -> Copy:
    """This rank's gradients in the tier. gradients: 1D, fp32, on the device, counted as a buffer

    Read what it returns after `settle`.
    """
    yield tier, [gradients]
    there = _room(gradients.numel(), gradients.dtype, gradients.device)
    there.copy_(gradients, non_blocking=True)
    call.ledger.add(tier, STASH.name, "native", gradients.nbytes)
    call.release(gradients)
    return there


def fetch(call: Call, master: torch.Tensor, dtype: torch.dtype, device: torch.device, tier: Tier) -> Copy:
    """This rank's new weights on the device, 1D, in the compute dtype, counted as a buffer.

    master: 1D, fp32, in the tier; it may change as soon as the lane has passed
    """
    yield tier, [master]
    rounded = call.hold(_room(master.numel(), dtype, device), tier)
    rounded.copy_(master)
    fetched = call.hold(torch.empty(master.numel(), dtype=dtype, device=device))
    fetched.copy_(rounded, non_blocking=True)
    call.ledger.add(tier, FETCH.name, "native", fetched.nbytes)
    call.release(rounded, tier)
    return fetched


def settle(device: torch.device) -> None:
    """Return when the CPU may read what has been stashed: all that the caller has waited for."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _room(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory that a device's copies may read and fill."""
    return torch.empty(numel, dtype=dtype, device=HOST, pin_memory=device.type == "cuda")
