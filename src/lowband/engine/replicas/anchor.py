"""One unit's anchor: the weights that replicas agreed on last, and their next exchange (spec.sync).

A rank's piece of the anchor is reduced over the replicas, as its difference from the weights, so that each
rank of the job gets its part of the mean; there the outer optimizer keeps its momentum and computes an
update; the updates are gathered back to the pieces. Every replica applies the same update to the same anchor,
so anchors are equal bit by bit after it, on any wire.
"""

from functools import partial

import torch

from lowband.engine.replicas.exchange import Exchange
from lowband.engine.transport.call import Call
from lowband.engine.transport.lane import Work
from lowband.engine.units.unit import Unit
from lowband.spec.mesh import WORLD
from lowband.spec.step import SYNC_REDUCE
from lowband.spec.sync import Sync


class Anchor(Exchange):
    """This rank's piece of a unit's anchor, and its part of the outer optimizer's momentum.

    values:   1D, fp32, this rank's shard over the level of a replica
    momentum: 1D, fp32, this rank's shard over the world; None without momentum
    """

    update_name = "sync.update"

    def __init__(self, unit: Unit, sync: Sync) -> None:
        super().__init__(unit, sync)
        self._outer_range = unit.range_of(WORLD)
        self.values = unit.meter.hold("anchor", self.weights.clone())
        self.momentum: torch.Tensor | None = None
        if sync.has_momentum:
            zeros = self.values.new_zeros(self._outer_range[1] - self._outer_range[0])
            self.momentum = unit.meter.hold("outer", zeros)

    @property
    def has_moved(self) -> bool:
        return not torch.equal(self.values, self.weights)

    def begin(self) -> None:
        self.forget()
        self.values.copy_(self.weights)
        if self.momentum is not None:
            self.momentum.zero_()

    def moved(self) -> torch.Tensor:
        """How far the weights have moved from the anchor, 1D, of the piece, downhill."""
        return self.values - self.weights

    def bring(self, mean: torch.Tensor, is_step: bool) -> None:
        """Have an exchange on its way that others have made.

        mean: of the replicas' `moved`; overwritten. is_step: whether it is an outer step; else it is zero
        """
        if is_step:
            self._outer_step(mean)
        self._update = mean
        self._hold(mean)

    def start(self, is_late: bool, number: int) -> None:
        moved = self.moved()
        if is_late:
            self._hold(moved)
        self._exchange = self._collectives.submit(
            self.unit.name,
            self._collectives.levels_of_reduction(SYNC_REDUCE, moved.dtype),
            partial(self._reduce, moving=[moved]),
            uses=[moved],
            ledger=self.sent,
        )

    def _reduce(self, call: Call, moving: list[torch.Tensor]) -> Work:
        """moving: how far this rank's piece has moved; a list, so that it can be freed once it is sent"""
        moved = [call.hold(moving.pop())]
        update = yield from self._collectives.reduce(call, moved.pop(), SYNC_REDUCE, self._outer_step)
        call.release(update)
        self._update = update

    def _outer_step(self, sum_: torch.Tensor) -> None:
        """From the sum of the replicas' differences to the update, in place."""
        update, sync = sum_, self._sync
        self._divide(update)
        if self.momentum is not None:
            self.momentum.mul_(sync.momentum).add_(update)
            if sync.outer == "nesterov":
                update += sync.momentum * self.momentum
            else:
                update.copy_(self.momentum)
            update *= sync.learning_rate

    def finish(self, mix: float) -> None:
        self.values -= self._take_update()
        self._spread(mix * self.weights + (1 - mix) * self.values if mix else self.values)

    def agree(self) -> None:
        self.start(is_late=False, number=0)
        self.finish(mix=0.0)

    def agreed(self) -> tuple[torch.Tensor, str]:
        return self.values, self.level

    def held(self) -> list[tuple[str, torch.Tensor, tuple[int, int], bool]]:
        found = [("sync.anchor", self.values, self.range, True)]
        if self.is_in_flight:
            found.append((self.update_name, self.update(), self.range, True))
        if self.momentum is not None:
            found.append(("sync.outer", self.momentum, self._outer_range, False))
        return found
