"""A unit's optimizer states in host memory that come to the device for each update, and leave it behind it.

The device has memory for two units of them, one that is updated and one that comes or goes: what is said of
states on a disk (units.on_disk) holds for these, a memory further up.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch

from lowband.engine.collectives.copies import room
from lowband.engine.units.on_disk import OnDisk
from lowband.spec.tiers import DEVICE, HOST, Tier


class HostStates:
    """Host memory for tensors of the device that have memory only while they are used."""

    is_direct = False

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] = []

    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy them. On a GPU in the current stream, in whose order they may be freed."""
        if [(kept.numel(), kept.dtype) for kept in self._kept] != [(t.numel(), t.dtype) for t in tensors]:
            self._kept = [room(t.numel(), t.dtype, t.device) for t in tensors]
        for kept, tensor in zip(self._kept, tensors, strict=True):
            kept.copy_(tensor.detach(), non_blocking=True)
            if tensor.is_cuda:  # the optimizer has made it in its own stream
                tensor.record_stream(torch.cuda.current_stream(tensor.device))

    def read(self, tensors: Sequence[torch.Tensor]) -> None:
        """Fill them with what was copied."""
        for kept, tensor in zip(self._kept, tensors, strict=True):
            tensor.detach().copy_(kept, non_blocking=True)


class ToAndFro(OnDisk):
    """One unit's states on one rank."""

    tier: ClassVar[Tier] = HOST
    used_in: ClassVar[Tier] = DEVICE
    lane: ClassVar[str] = HOST
    place: ClassVar[str] = "in host memory"
    called: ClassVar[str] = "states that come to the device"
    is_behind: ClassVar[bool] = False
