"""What units' forwards keep for the backward, in host memory: as torch's `save_on_cpu`, but counted.

Copies run in the order of the caller's stream, so what is kept needs no other memory on the device.
"""

from typing import NamedTuple

import torch

from lowband.engine.transport.ledger import Ledger
from lowband.spec.activations import KEEP_FETCH, KEEP_STASH
from lowband.spec.tiers import HOST


class Kept(NamedTuple):
    """values: on the host; device: whose they were"""

    values: torch.Tensor
    device: torch.device


class KeptOnHost:
    """The copies of one module's activations."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def stash(self, tensor: torch.Tensor) -> Kept:
        is_pinned = tensor.device.type == "cuda"
        there = torch.empty(tensor.size(), dtype=tensor.dtype, device="cpu", pin_memory=is_pinned)
        there.copy_(tensor.detach(), non_blocking=is_pinned)
        self._ledger.add(HOST, KEEP_STASH.name, "native", there.nbytes)
        return Kept(there, tensor.device)

    def fetch(self, kept: Kept) -> torch.Tensor:
        self._ledger.add(HOST, KEEP_FETCH.name, "native", kept.values.nbytes)
        return kept.values.to(kept.device, non_blocking=True, copy=True)
