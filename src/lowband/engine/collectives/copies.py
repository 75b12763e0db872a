"""Copies of a rank's own shards between the device and another memory, each in the lane of that tier.

On a GPU they run behind the computation, so what the copy engine reads or fills there is pinned: gradients,
and one unit's new weights at a time. Master weights and the optimizer's states are not: the CPU uses them.
"""

from collections.abc import Generator, Sequence

import torch

from lowband.engine.transport.call import Call
from lowband.errors import UserError
from lowband.spec.step import FETCH, STASH
from lowband.spec.tiers import HOST

Copy = Generator[tuple[str, Sequence[torch.Tensor]], None, torch.Tensor]
CPU = torch.device("cpu")
NOT_PINNED = "out of memory", "alloc", "HostRegister", "when none is available"  # in torch's errors


def stash(call: Call, gradients: torch.Tensor) -> Copy:
    """This rank's gradients in host memory. gradients: 1D, fp32, on the device, counted as a buffer

    Read what it returns after `settle`.
    """
    yield HOST, [gradients]
    there = room(gradients.numel(), gradients.dtype, gradients.device)
    there.copy_(gradients, non_blocking=True)
    call.ledger.add(HOST, STASH.name, "native", gradients.nbytes)
    call.release(gradients)
    return there


def fetch(call: Call, new: torch.Tensor, dtype: torch.dtype, device: torch.device) -> Copy:
    """This rank's new weights on the device, 1D, in the compute dtype, counted as a buffer.

    new: 1D, in host memory; it may change as soon as the lane has passed
    """
    yield HOST, [new]
    rounded = call.hold(room(new.numel(), dtype, device), HOST)
    rounded.copy_(new)
    fetched = call.hold(torch.empty(new.numel(), dtype=dtype, device=device))
    fetched.copy_(rounded, non_blocking=True)
    call.ledger.add(HOST, FETCH.name, "native", fetched.nbytes)
    call.release(rounded, HOST)
    return fetched


def settle(device: torch.device) -> None:
    """Return when the CPU may read what has been stashed: all that the caller has waited for."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def room(size: int | torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Host memory that a device's copies may read and fill. Raises UserError if it cannot be pinned."""
    is_pinned = device.type == "cuda"
    try:
        return torch.empty(size, dtype=dtype, device=CPU, pin_memory=is_pinned)
    except RuntimeError as error:
        if not is_pinned or not any(word in str(error) for word in NOT_PINNED):
            raise  # of a kernel that ran before, say
        numel = size if isinstance(size, int) else size.numel()
        raise UserError(
            f"{numel * dtype.itemsize:,} bytes of it cannot be pinned: {str(error).splitlines()[0]}",
            where="host memory",
            allowed="more of it, `ulimit -l unlimited`; fewer states or activations there",
        ) from error
