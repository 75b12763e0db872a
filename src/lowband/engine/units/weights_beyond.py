"""A rank's shard of a unit's weights, in the compute dtype, in another tier: in host memory, or in a file.

It is on the device while the unit is gathered, which starts one unit ahead. New weights are gathered as they
come from the optimizer, and stashed behind that.

[Note: order] Copies of one tier run in one lane, in the order in which they were submitted, so that nothing
is read before it is written. A disk's pass through host memory, where they are for as long as that takes.
"""

from collections.abc import Generator
from typing import Any

import torch

from lowband.engine.collectives.collectives import Collectives
from lowband.engine.collectives.copies import room, settle
from lowband.engine.transport.call import Call
from lowband.engine.transport.lane import Work
from lowband.errors import UserError
from lowband.spec.step import WEIGHTS_STASH, Collective
from lowband.spec.tiers import DISK, HOST, Tier, at


class WeightsBeyond:
    """One unit's shard on one rank.

    values: 1D, host memory; of a disk, until `settle`
    inwards, outwards: the tiers whose lanes a fetch, or a stash, passes
    """

    def __init__(self, unit: str, numel: int, collectives: Collectives) -> None:
        """Zeros. unit: its name"""
        scheme, options = collectives.scheme, collectives.options
        self._collectives, self._numel, self._dtype = collectives, numel, options.compute_dtype
        self._is_on_disk = scheme.weights_tier == DISK
        self._residents = collectives.residents
        self.outwards: list[Tier] = [HOST, DISK] if self._is_on_disk else [HOST]
        self.inwards = self.outwards[::-1]
        self.values = room(numel, self._dtype, collectives.device).zero_()
        collectives.meter.add(at("weights", scheme.weights_tier), self.values.nbytes)
        if self._residents is not None:
            collectives.meter.add("weights", self._residents.add(self.values.nbytes))
        if not self._is_on_disk:
            return
        if options.disk is None:
            raise UserError(
                f"weights {at(scheme.weights, DISK)}, and no folder",
                where=f"scheme '{scheme.name}'",
                allowed="lowband.shard(..., disk=folder)",
            )
        self._file = options.disk.file(f"{unit} (weights)", self.values.nbytes)

    def settle(self) -> None:
        """Have the tier keep the values, from now on."""
        if self._is_on_disk:
            self._file.write([self.values])
            self.values = self.values.new_empty(0)

    def fetch(self, call: Call, row: Collective) -> Generator[Any, None, tuple[torch.Tensor, bool]]:
        """The shard on the device, 1D, and whether it is counted as a buffer: not if it stays there.

        row: whose copy it is
        """
        device, there = self._collectives.device, self.values
        if self._is_on_disk:
            yield DISK, []
            there = call.hold(room(self._numel, self._dtype, device), HOST)
            self._file.read([there])
            call.ledger.add(DISK, row.name, "native", there.nbytes)
        yield HOST, [there]
        stays = False
        if self._residents is not None:
            found, stays = self._residents.take(self, self.values.nbytes)
            if found is not None:
                return (found if stays else call.hold(found)), not stays
        fetched = torch.empty(self._numel, dtype=self._dtype, device=device)
        fetched.copy_(there, non_blocking=True)
        call.ledger.add(HOST, row.name, "native", fetched.nbytes)
        if self._is_on_disk:
            call.release(there, HOST)
        if stays and self._residents is not None:
            self._residents.keep(self, fetched)
        else:
            call.hold(fetched)
        return fetched, not stays

    def stash(self, call: Call, new: torch.Tensor) -> Work:
        """Keep new weights. new: 1D, on the device"""
        yield HOST, [new]
        device, there = self._collectives.device, self.values
        if self._is_on_disk:
            there = call.hold(room(self._numel, self._dtype, device), HOST)
        there.copy_(new, non_blocking=True)
        call.ledger.add(HOST, WEIGHTS_STASH.name, "native", new.nbytes)
        if self._residents is not None:
            self._residents.renew(self, new)
        if self._is_on_disk:
            yield DISK, [there]
            settle(device)
            self._file.write([there])
            call.ledger.add(DISK, WEIGHTS_STASH.name, "native", there.nbytes)
            call.release(there, HOST)
