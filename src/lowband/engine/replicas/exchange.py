"""One unit's part in the exchanges between replicas (spec.sync), whatever they exchange.

A replica's ranks each hold a piece of the unit's fp32 weights that takes part: their shard over the level of
a replica.

[Note: on its way] Between its start and its arrival an exchange runs in the lanes of the levels beyond the
replica. Nothing else that a replica's units send crosses these levels, so it can be as long as it likes
without holding up a gather or a reduction. It refers to a copy of what it sends, and to the outer momentum,
which nobody else touches meanwhile; weights are free for training. Its bytes are counted when it arrives,
because when they leave depends on timing.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch

from lowband.engine.transport.call import Call
from lowband.engine.transport.lane import Handle, Work
from lowband.engine.transport.ledger import Ledger
from lowband.engine.units.unit import Unit
from lowband.spec.step import ANCHOR_GATHER, SYNC_REDUCE
from lowband.spec.sync import Sync

# The scheme's wires are for training: by a name that it does not know, values travel unchanged.
_MEAN = replace(SYNC_REDUCE, name="replica_mean")


class Exchange(ABC):
    """This rank's piece of a unit, and the exchange of it that is on its way.

    range:   of the unit's elements
    weights: 1D, fp32, a view of them
    sent:    what the exchange on its way has sent
    """

    update_name: ClassVar[str]  # of an exchange that has not arrived, in a manifest

    def __init__(self, unit: Unit, sync: Sync) -> None:
        self.unit, self.level = unit, sync.beyond
        self._sync, self._collectives = sync, unit.collectives
        self.range = unit.range_of(self.level)
        first = unit.optim_range[0]
        self._weights = unit.master[self.range[0] - first : self.range[1] - first]
        self._replicas = unit.levels.world // unit.levels.size(self.level)
        self.sent = Ledger()
        self._exchange: Handle | None = None
        self._update: torch.Tensor | None = None  # 1D, of the piece
        self._held_bytes = 0  # counted as in flight

    @property
    def weights(self) -> torch.Tensor:
        self.unit.clear_padding()
        return self._weights

    @abstractmethod
    def begin(self) -> None:
        """Drop what is on its way; the present weights are those that all replicas begin with."""

    @abstractmethod
    def start(self, is_late: bool, number: int) -> None:
        """Submit the exchange of the present weights.

        is_late: whether training goes on meanwhile
        number:  how many exchanges of the unit there were before
        """

    @abstractmethod
    def finish(self, mix: float) -> None:
        """Wait for the exchange, and give the weights its result, but for a part `mix`."""

    @abstractmethod
    def agree(self) -> None:
        """Exchange the present weights, which are then equal on all replicas."""

    @abstractmethod
    def agreed(self) -> tuple[torch.Tensor, str]:
        """The weights that stand for all replicas, 1D, and the level that they are sharded over."""

    @abstractmethod
    def held(self) -> list[tuple[str, torch.Tensor, tuple[int, int], bool]]:
        """What a checkpoint has of it: name, values, their range, whether replicas share them."""

    @property
    def has_moved(self) -> bool:
        """Whether this replica's weights may differ from those that all agreed on last."""
        return True

    @property
    def is_in_flight(self) -> bool:
        """Whether an exchange has started and not arrived."""
        return self._exchange is not None or self._update is not None

    def update(self) -> torch.Tensor:
        """Wait for the exchange on its way; its result, 1D, of the piece."""
        if self._exchange is not None:
            exchange, self._exchange = self._exchange, None
            exchange.wait()
        assert self._update is not None
        return self._update

    def resume(self) -> None:
        """Have an exchange on its way whose `update` is to be overwritten with a checkpoint's."""
        self._update = torch.zeros_like(self.weights)
        self._hold(self._update)

    def forget(self) -> None:
        """Drop the exchange on its way."""
        if self.is_in_flight:
            self._take_update()

    def mean(self, ledger: Ledger | None = None) -> torch.Tensor:
        """The mean of the replicas' present weights, 1D, of the piece. Every rank must call it at once.

        ledger: where its bytes are counted; default: with all others
        """
        found: list[torch.Tensor] = []

        def reduce(call: Call) -> Work:
            own = call.hold(self.weights.clone())
            mean = yield from self._collectives.reduce(call, own, _MEAN, self._divide)
            call.release(mean)
            found.append(mean)

        levels = self._collectives.levels_of_reduction(_MEAN, self.weights.dtype)
        self._collectives.submit(self.unit.name, levels, reduce, ledger=ledger).wait()
        return found.pop()

    def _divide(self, sum_: torch.Tensor) -> None:
        if self._replicas > 1:
            sum_ /= self._replicas

    def _hold(self, tensor: torch.Tensor) -> None:
        """Count what is on its way, first what is sent, then the update, which is as large."""
        self.unit.meter.hold("in_flight", tensor)
        self._held_bytes = tensor.nbytes

    def _take_update(self) -> torch.Tensor:
        update, self._update = self.update(), None
        self.unit.meter.release("in_flight", self._held_bytes)
        self._held_bytes = 0
        for sent in self.sent.take():
            self._collectives.ledger.add(sent.level, sent.collective, sent.wire, int(sent.bytes))
        return update

    def _spread(self, mine: torch.Tensor) -> None:
        """Give ranks of a replica that hold the same weights each other's new pieces. mine: this rank's"""
        collectives, optim = self._collectives, self.unit.scheme.optim
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
            self.weights.copy_(mine)
        self.unit.changes.count_step()
