"""What units' forwards keep for the backward, in host memory: as torch's `save_on_cpu`, but counted.

Copies run in the order of the caller's stream, so what is kept needs no other memory on the device.
"""

from collections import deque
from collections.abc import Collection
from contextlib import suppress

import torch
from torch import nn

from lowband.engine.collectives.copies import room
from lowband.engine.transport.ledger import Ledger
from lowband.engine.transport.meter import MemoryMeter
from lowband.spec.activations import KEEP_FETCH, KEEP_STASH, KEPT_KIND
from lowband.spec.tiers import HOST


class Kept:
    """values: on the host; device: whose they were; ended: gets their bytes when nothing refers to this"""

    def __init__(self, values: torch.Tensor, device: torch.device, ended: deque[int]) -> None:
        self.values, self.device, self._ended = values, device, ended

    def __del__(self) -> None:
        self._ended.append(self.values.nbytes)


class KeptOnHost:
    """The copies of one module's activations."""

    def __init__(self, ledger: Ledger, meter: MemoryMeter, units: Collection[nn.Module]) -> None:
        """units: modules whose activations they are, without those of units inside of them"""
        self.units = units
        self._ledger, self._meter = ledger, meter
        # Copies end with their graph, anywhere and in any thread, perhaps inside of the meter's lock: the
        # meter hears of it from the next stash.
        self._ended = deque[int]()

    def stash(self, tensor: torch.Tensor) -> Kept:
        there = room(tensor.size(), tensor.dtype, tensor.device)
        there.copy_(tensor.detach(), non_blocking=tensor.device.type == "cuda")
        self._ledger.add(HOST, KEEP_STASH.name, "native", there.nbytes)
        with suppress(IndexError):
            while True:
                self._meter.release(KEPT_KIND, self._ended.popleft())
        self._meter.add(KEPT_KIND, there.nbytes)
        return Kept(there, tensor.device, self._ended)

    def fetch(self, kept: Kept) -> torch.Tensor:
        self._ledger.add(HOST, KEEP_FETCH.name, "native", kept.values.nbytes)
        return kept.values.to(kept.device, non_blocking=True, copy=True)
