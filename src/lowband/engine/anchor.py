"""One unit's anchor: the weights that replicas agreed on last, and their next exchange (spec.sync).

A replica's ranks each hold a piece of the anchor, and only that piece of their weights takes part in the
exchange. Its difference from the anchor is reduced over the replicas, so that each rank of the job gets its
part of the mean; there the outer optimizer keeps its momentum and computes an update; the updates are
gathered back to the pieces. Every replica applies the same update to the same anchor, so anchors are equal
bit by bit after it, on any wire.

[Note: on its way] Between its start and its arrival an exchange runs in the lanes of the levels beyond the
replica. Nothing else that a replica's units send crosses these levels, so it can be as long as it likes
without holding up a gather or a reduction. It refers to a copy of what has moved, and to the momentum, which
nobody else touches meanwhile; weights and anchor are free for training. Its bytes are counted when it
arrives, because when they leave depends on timing.
"""

from functools import partial
from typing import TYPE_CHECKING

import torch

from lowband.engine.call import Call
from lowband.engine.lane import Handle, Work
from lowband.engine.ledger import Ledger
from lowband.spec.mesh import WORLD
from lowband.spec.step import ANCHOR_GATHER, SYNC_REDUCE

if TYPE_CHECKING:
    from lowband.engine.shard import Unit
    from lowband.spec.sync import Sync


class Anchor:
    """This rank's piece of a unit's anchor, and its part of the outer optimizer's momentum.

    values:   1D, fp32, this rank's shard over the level of a replica
    momentum: 1D, fp32, this rank's shard over the world; None without momentum
    sent:     what the exchange on its way has sent
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
        self.sent = Ledger()
        self._exchange: Handle | None = None
        self._update: torch.Tensor | None = None  # 1D, like `values`: to be subtracted from them
        self._held_bytes = 0  # counted as in flight

    def begin(self) -> None:
        """Make the present weights the anchor."""
        self.forget()
        self.values.copy_(self._weights)
        if self.momentum is not None:
            self.momentum.zero_()

    def start(self, is_late: bool) -> None:
        """Submit the exchange of the present weights. is_late: whether training goes on meanwhile"""
        moved = self.values - self._weights
        if is_late:
            self._hold(moved)
        self._exchange = self._collectives.submit(
            self.unit.name,
            self._collectives.levels_of_reduction(SYNC_REDUCE, moved.dtype),
            partial(self._reduce, moving=[moved]),
            uses=[moved],
            ledger=self.sent,
        )

    def _hold(self, tensor: torch.Tensor) -> None:
        """Count what is on its way, first what has moved, then the update, which is as large."""
        self.unit.meter.hold("in_flight", tensor)
        self._held_bytes = tensor.nbytes

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

    @property
    def is_in_flight(self) -> bool:
        """Whether an exchange has started and not arrived."""
        return self._exchange is not None or self._update is not None

    def update(self) -> torch.Tensor:
        """Wait for the exchange on its way; its result, 1D, like `values`."""
        if self._exchange is not None:
            exchange, self._exchange = self._exchange, None
            exchange.wait()
        assert self._update is not None
        return self._update

    def resume(self) -> None:
        """Have an exchange on its way whose `update` is to be overwritten with a checkpoint's."""
        self._update = torch.zeros_like(self.values)
        self._hold(self._update)

    def forget(self) -> None:
        """Drop the exchange on its way."""
        if self.is_in_flight:
            self._take_update()

    def _take_update(self) -> torch.Tensor:
        update, self._update = self.update(), None
        self.unit.meter.release("in_flight", self._held_bytes)
        self._held_bytes = 0
        for sent in self.sent.take():
            self._collectives.ledger.add(sent.level, sent.collective, sent.wire, int(sent.bytes))
        return update

    def finish(self, mix: float) -> None:
        """Wait for the exchange, and make its result the anchor and, but for a part `mix`, the weights."""
        self.values -= self._take_update()
        collectives, optim = self._collectives, self.unit.scheme.optim
        mine = mix * self._weights + (1 - mix) * self.values if mix else self.values
        levels = collectives.inwards(optim, self.level)
        if levels:
            gather = partial(
                collectives.gather,
                shard=mine,
                out=self.unit.master,
                inner=optim,
                outer=self.level,
                name=ANCHOR_GATHER.name,
            )
            collectives.submit(self.unit.name, levels, gather, uses=[mine]).wait()
        else:
            self._weights.copy_(mine)
        self.unit.changes.count_step()
