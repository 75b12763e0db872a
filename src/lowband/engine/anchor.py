"""One unit's anchor: the weights that replicas agreed on last, and their next exchange (spec.sync).

A replica's ranks each hold a piece of the anchor, and only that piece of their weights takes part in the
exchange. Its difference from the anchor is reduced over the replicas, so that each rank of the job gets its
part of the mean; there the outer optimizer keeps its momentum and computes an update; the updates are
gathered back to the pieces. Every replica applies the same update to the same anchor, so replicas are equal
bit by bit after it, on any wire.
"""

from functools import partial
from typing import TYPE_CHECKING

import torch

from lowband.engine.call import Call
from lowband.engine.lane import Handle, Work
from lowband.spec.mesh import WORLD
from lowband.spec.step import ANCHOR_GATHER, SYNC_REDUCE

if TYPE_CHECKING:
    from lowband.engine.shard import Unit
    from lowband.spec.sync import Sync


class Anchor:
    """This rank's piece of a unit's anchor, and its part of the outer optimizer's momentum.

    values:   1D, fp32, this rank's shard over the level of a replica
    momentum: 1D, fp32, this rank's shard over the world; None without momentum
    """

    def __init__(self, unit: "Unit", sync: "Sync") -> None:
        self.unit, self.level = unit, sync.beyond
        self._sync, self._collectives = sync, unit.collectives
        self.range, self.outer_range = unit.range_of(self.level), unit.range_of(WORLD)
        first = unit.optim_range[0]
        self._weights = unit.master[self.range[0] - first : self.range[1] - first]
        self.values = unit.meter.hold("anchor", self._weights.clone())
        self.momentum: torch.Tensor | None = None
        if sync.has_momentum:
            zeros = self.values.new_zeros(self.outer_range[1] - self.outer_range[0])
            self.momentum = unit.meter.hold("outer", zeros)
        self._replicas = unit.levels.world // unit.levels.size(self.level)
        self._exchange: Handle | None = None
        self._update: torch.Tensor | None = None  # 1D, like `values`: to be subtracted from them

    def begin(self) -> None:
        """Make the present weights the anchor."""
        self.values.copy_(self._weights)
        if self.momentum is not None:
            self.momentum.zero_()

    def start(self) -> None:
        """Submit the exchange of the present weights."""
        moved = self.values - self._weights
        self._exchange = self._collectives.submit(
            self.unit.name,
            self._collectives.levels_of_reduction(SYNC_REDUCE, moved.dtype),
            partial(self._reduce, moving=[moved]),
            uses=[moved],
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
        if self._replicas > 1:
            update /= self._replicas
        if self.momentum is not None:
            self.momentum.mul_(sync.momentum).add_(update)
            if sync.outer == "nesterov":
                update += sync.momentum * self.momentum
            else:
                update.copy_(self.momentum)
            update *= sync.learning_rate

    def finish(self) -> None:
        """Wait for the exchange and make its result the anchor and the weights."""
        assert self._exchange is not None
        exchange, self._exchange = self._exchange, None
        exchange.wait()
        assert self._update is not None
        self.values -= self._update
        self._update = None
        self.take_values()

    def take_values(self) -> None:
        """Make the anchor the weights."""
        collectives, optim = self._collectives, self.unit.scheme.optim
        levels = collectives.inwards(optim, self.level)
        if levels:
            gather = partial(
                collectives.gather,
                shard=self.values,
                out=self.unit.master,
                inner=optim,
                outer=self.level,
                name=ANCHOR_GATHER.name,
            )
            collectives.submit(self.unit.name, levels, gather).wait()
        else:
            self._weights.copy_(self.values)
        self.unit.changes.count_step()
