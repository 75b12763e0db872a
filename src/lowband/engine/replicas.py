"""Replicas that meet seldom: when a module's units exchange their weights.

An exchange follows the optimizer's step that completes a period, inside of `optimizer.step()`: the training
loop makes no call that it could forget. Steps of all torch optimizers are counted (engine.changes). Several
optimizers may share the module: a step is complete when each trainable parameter has been stepped once.
"""

from collections import deque
from collections.abc import Sequence

import torch
from torch import nn

from lowband.engine.anchor import Anchor
from lowband.engine.shard import Unit
from lowband.errors import UserError
from lowband.spec.sync import Sync

MOST_EXCHANGING = 2  # units at once, because each holds a difference and an update


class Replicas:
    """The exchanges of one sharded module.

    steps:  optimizer steps since the last exchange
    is_new: whether there was no step yet; the weights may still be loaded, so the anchor is not valid
    """

    def __init__(self, sync: Sync, units: Sequence[Unit]) -> None:
        self.sync = sync
        self.anchors = [Anchor(unit, sync) for unit in units if unit.requires_grad]
        self.steps, self.is_new = 0, True
        self._open = {shard for anchor in self.anchors for shard in anchor.unit.shards}  # not stepped yet
        self._trained = frozenset(self._open)
        for anchor in self.anchors:
            anchor.unit.changes.watcher = self

    def before_step(self) -> None:
        """Before the first step, the weights become the anchor."""
        if self.is_new:
            self.begin()

    def after_step(self, shards: list[nn.Parameter]) -> None:
        """Count a step of an optimizer that has these shards."""
        again = [shard for shard in shards if shard not in self._open]
        if again:
            left = min(self._open, key=_name)  # the same on every rank
            raise UserError(
                f"'{_name(again[0])}' was stepped twice before '{_name(left)}' was stepped once",
                where="sync",
                allowed="optimizers that together step every trainable parameter once per step",
            )
        self._open -= set(shards)
        if self._open:
            return
        self._open = set(self._trained)
        self.steps += 1
        if self.steps >= self.sync.every:  # more, after a checkpoint of a longer period
            self.exchange()

    @property
    def is_between_steps(self) -> bool:
        """Whether no parameter has been stepped in a step that others have not taken yet."""
        return len(self._open) == len(self._trained)

    def begin(self) -> None:
        """Begin a period: the present weights, which replicas share, are the anchor, without momentum."""
        for anchor in self.anchors:
            anchor.begin()
        self.steps, self.is_new = 0, False

    def resume(self, steps: int) -> None:
        """Go on with the anchor and the momentum of a checkpoint, `steps` after its last exchange."""
        self.steps, self.is_new = steps, False

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the present weights of all replicas, which are equal afterwards."""
        self.before_step()
        exchanging: deque[Anchor] = deque()
        for anchor in self.anchors:
            if len(exchanging) == MOST_EXCHANGING:
                exchanging.popleft().finish()
            anchor.start()
            exchanging.append(anchor)
        for anchor in exchanging:
            anchor.finish()
        self.steps = 0


def _name(shard: nn.Parameter) -> str:
    name: str = shard.shard_of.name  # type: ignore[attr-defined]
    return name
