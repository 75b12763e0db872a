"""Replicas that meet seldom: when a module's units exchange their weights.

An exchange follows the optimizer's step that completes a period, inside of `optimizer.step()`: the training
loop makes no call that it could forget. Steps of all torch optimizers are counted (engine.changes). Several
optimizers may share the module: a step is complete when each trainable parameter has been stepped once.
"""

from collections import deque
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from lowband.engine.anchor import Anchor
from lowband.engine.lane import Lanes
from lowband.engine.shard import Unit
from lowband.errors import UserError
from lowband.spec.records import Sent
from lowband.spec.sync import Sync

MOST_EXCHANGING = 2  # units at once, without delay, because each holds a difference or an update


class Replicas:
    """The exchanges of one sharded module.

    steps:  optimizer steps since the period began
    is_new: whether there was no step yet; the weights may still be loaded, so the anchor is not valid
    """

    def __init__(self, sync: Sync, units: Sequence[Unit], lanes: Lanes) -> None:
        self.sync, self._lanes = sync, lanes
        self.anchors = [Anchor(unit, sync) for unit in units if unit.requires_grad]
        self._fragments = [
            [anchor for unit, anchor in enumerate(self.anchors) if sync.fragment_of(unit) == fragment]
            for fragment in range(sync.fragments)
        ]
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
        self.advance()

    @property
    def is_between_steps(self) -> bool:
        """Whether no parameter has been stepped in a step that others have not taken yet."""
        return len(self._open) == len(self._trained)

    def begin(self) -> None:
        """Begin a period: the present weights, which replicas share, are the anchor, without momentum."""
        for anchor in self.anchors:
            anchor.begin()
        self.steps, self.is_new = 0, False

    def resume(self, steps: int, in_flight: Collection[Anchor]) -> None:
        """Go on with the anchor and the momentum of a checkpoint, `steps` after a period began.

        in_flight: anchors of which the checkpoint has the update of an exchange that had not arrived
        Under a shorter period the next step ends it.
        """
        for anchor in self.anchors:
            anchor.forget()
        self.steps, self.is_new = min(steps, self.sync.every - 1), False
        for anchor in in_flight:
            anchor.resume()

    def sent_in_flight(self) -> dict[str, list[Sent]]:
        """Wait for what is on its way; what this rank has sent for it, not counted yet, by unit."""
        moving = [anchor for anchor in self.anchors if anchor.is_in_flight]
        for anchor in moving:
            anchor.update()
        return {anchor.unit.name: anchor.sent.read() for anchor in moving}

    def count_in_flight(self, sent: Mapping[str, Sequence[Sent]]) -> None:
        """After `resume`: what the run before has sent for exchanges that have not arrived."""
        for anchor in self.anchors:
            for one in sent.get(anchor.unit.name, ()):
                anchor.sent.add(one.level, one.collective, one.wire, int(one.bytes))

    @torch.no_grad()
    def advance(self) -> None:
        """Count a step; take what arrives after it, then start what is due."""
        sync = self.sync
        self.steps += 1
        arriving, starting = sync.arrives(self.steps), sync.starts(self.steps)
        with self._lanes.exchanging():
            if arriving is not None:
                self._arrive(self._fragments[arriving])
            if starting is not None:  # if it is still on its way, after a checkpoint of another delay
                self._arrive(self._fragments[starting])
            if starting is not None and sync.delay:
                for anchor in self._fragments[starting]:
                    anchor.start(is_late=True)
            elif starting is not None:
                self._exchange(self._fragments[starting], sync.mix)
        self.steps %= sync.every

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the present weights of all replicas, which are equal afterwards; a new period begins."""
        self.before_step()
        with self._lanes.exchanging():
            self._arrive(self.anchors)
            self._exchange(self.anchors, mix=0.0)
        self.steps = 0

    def _arrive(self, anchors: Sequence[Anchor]) -> None:
        """Wait for their exchanges that are on their way, and take the results."""
        for anchor in anchors:
            if anchor.is_in_flight:
                anchor.finish(self.sync.mix)

    def _exchange(self, anchors: Sequence[Anchor], mix: float) -> None:
        """Start and finish their exchanges."""
        exchanging: deque[Anchor] = deque()
        for anchor in anchors:
            if len(exchanging) == MOST_EXCHANGING:
                exchanging.popleft().finish(mix)
            anchor.start(is_late=False)
            exchanging.append(anchor)
        for anchor in exchanging:
            anchor.finish(mix)


def _name(shard: nn.Parameter) -> str:
    name: str = shard.shard_of.name  # type: ignore[attr-defined]
    return name
