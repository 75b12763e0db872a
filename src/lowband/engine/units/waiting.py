"""Gradients that wait: backward passes under `no_sync` have left them to a later one, which reduces them.

Until then no shard has them. A step would leave them out without an error, and the next one would take them.
So it is refused while parameters of its have gradients that wait; `zero_grad` discards these, too. So is a
checkpoint, which has no gradients: after a save they would be lost, after a load added to those of other
weights. A backward that ends with an exception discards what waits, since some of it may have been reduced: a
step without it is refused, too, until `zero_grad`.
"""

from collections.abc import Callable, Iterable
from weakref import WeakSet

from torch import nn

from lowband.errors import UserError

_NO_SYNC = "the last backward before it outside of lowband.no_sync; zero_grad() to discard them"


class Waiting:
    """Those of some shards that are reduced together.

    shards: which have some
    before: which had some when the running backward began
    lost: those of them which a backward that broke has discarded
    """

    def __init__(self, clear: Callable[[set[nn.Parameter]], None]) -> None:
        """clear: called to discard those of some of the shards"""
        self.clear = clear
        self.shards: set[nn.Parameter] = set()
        self.before: set[nn.Parameter] = set()
        self.lost: set[nn.Parameter] = set()

    def be_of(self, shards: Iterable[nn.Parameter]) -> None:
        """Now these have some."""
        self.shards = set(shards)
        self._note()

    def begin(self) -> None:
        """A backward begins."""
        self.before = self.shards
        self._note()

    def end(self, is_broken: bool = False) -> None:
        """It ends. If it broke, what it may have added to or reduced in part is discarded."""
        if is_broken:
            self.lost |= self.before
            self.shards = set()
        self.before = set()
        self._note()

    def forgive(self, shards: set[nn.Parameter]) -> None:
        """These have no gradients any more, and need none."""
        self.lost, self.before = self.lost - shards, self.before - shards
        self._note()

    def _note(self) -> None:
        if self.shards or self.before or self.lost:
            _waiting.add(self)
        else:
            _waiting.discard(self)


_waiting: WeakSet[Waiting] = WeakSet()


def check_reduced(shards: Iterable[nn.Parameter], where: str, what: str, allowed: str = _NO_SYNC) -> None:
    """Raises UserError if some of the shards have gradients that wait. what: would become of them"""
    if not _waiting:
        return
    for shard in shards:
        name = f"'{shard.shard_of.name}'"  # type: ignore[attr-defined]
        if any(shard in each.shards for each in _waiting):
            raise UserError(
                f"{name} has gradients of backwards under no_sync, which {what}", where=where, allowed=allowed
            )
        if any(shard in each.lost for each in _waiting):
            raise UserError(
                f"{name} has lost gradients of backwards under no_sync to one that ended with an exception",
                where=where,
                allowed="zero_grad(), then all micro-batches of the step again",
            )


def discard(parameters: Iterable[nn.Parameter]) -> None:
    """Discard what waits for these parameters."""
    if not _waiting:
        return
    given = set(parameters)
    for each in list(_waiting):
        each.forgive(given)
        if found := each.shards & given:
            each.clear(found)
