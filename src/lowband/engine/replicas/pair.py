"""One unit's weights on the way between two replicas, whose partners change (spec.sync, `partners`).

Each rank sends its piece to the rank that has the same piece in another replica. There is no state beside
the weights, so replicas stay different, and only their mean is everybody's.

[Note: equal pairs] An exchange that is not late takes the mean of what was sent and received as the weights:
two replicas that average with each other are then equal bit by bit. A late one adds half of the difference,
because weights have moved since.
"""

from functools import partial

import torch

from lowband.engine.replicas.exchange import Exchange
from lowband.engine.transport.call import Call
from lowband.engine.transport.lane import Work
from lowband.engine.transport.ledger import Ledger
from lowband.spec.step import SYNC_SWAP


class Pair(Exchange):
    """This rank's piece of a unit, and what a partner's has yet to add to it."""

    update_name = "swap"

    def begin(self) -> None:
        self.forget()

    def start(self, is_late: bool, number: int) -> None:
        sent = self.weights.clone()
        if is_late:
            self._hold(sent)
        levels = self._collectives.levels_of_reduction(SYNC_SWAP, sent.dtype)
        swap = partial(self._swap, moving=[sent], is_late=is_late, number=number)
        self._exchange = self._collectives.submit(self.unit.name, levels, swap, uses=[sent], ledger=self.sent)

    def _swap(self, call: Call, moving: list[torch.Tensor], is_late: bool, number: int) -> Work:
        """moving: this rank's piece when the exchange started; a list, so that it can be freed"""
        sent = call.hold(moving.pop())
        partners = partial(self._sync.partner, replicas=self._replicas, exchange=number)
        update = yield from self._collectives.swap(call, sent, SYNC_SWAP, partners)
        if is_late:
            update -= sent
        else:
            update += sent
        update *= 0.5
        call.release(sent)
        call.release(update)
        self._update = update

    def finish(self, mix: float) -> None:
        is_late = bool(self._held_bytes)
        update = self._take_update()
        self._spread(update.add_(self.weights) if is_late else update)

    def agree(self) -> None:
        self._spread(self.mean())

    def agreed(self) -> tuple[torch.Tensor, str]:
        return self.mean(Ledger()), self.level

    def held(self) -> list[tuple[str, torch.Tensor, tuple[int, int], bool]]:
        return [(self.update_name, self.update(), self.range, False)] if self.is_in_flight else []
