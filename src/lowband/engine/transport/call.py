"""One submission to the lanes: its name in messages, and the bytes of its buffers."""

from dataclasses import dataclass, field

import torch

from lowband.engine.transport.ledger import Ledger
from lowband.engine.transport.meter import MemoryMeter
from lowband.spec.tiers import DEVICE, Tier, at


@dataclass
class Call:
    """One submission to the lanes: one or more collectives of a unit.

    number:  the submission's number on its topology
    unit:    name of the unit whose parameters are sent
    ledger:  where its bytes are counted
    buffers: bytes of its send and receive buffers, now and at the peak
    """

    number: int
    unit: str
    ledger: Ledger
    buffers: MemoryMeter = field(default_factory=MemoryMeter)

    def name(self, collective: str) -> str:
        return f"{collective} of '{self.unit}' (collective {self.number})"

    def hold(self, tensor: torch.Tensor, tier: Tier = DEVICE) -> torch.Tensor:
        """Count a buffer from now on; returns it."""
        return self.buffers.hold(at("buffers", tier), tensor)

    def release(self, tensor: torch.Tensor, tier: Tier = DEVICE) -> None:
        """Stop counting a buffer, which is about to be freed."""
        self.buffers.release(at("buffers", tier), tensor.nbytes)
