"""Gradients that wait: backward passes under `no_sync` have left them to a later one, which reduces them.

Until then no shard has them. A step would leave them out without an error, and the next one would take them.
So it is refused while parameters of its have gradients that wait; `zero_grad` discards these, too. So is a
checkpoint, which has no gradients: after a save they would be lost, after a load added to those of other
weights.
"""

from collections.abc import Callable, Iterable
from weakref import WeakSet

from torch import nn

from lowband.errors import UserError

_NO_SYNC = "the last backward before it outside of lowband.no_sync; zero_grad() to discard them"


class Waiting:
    """Those of some shards that are reduced together.

    shards: which have some
    """

    def __init__(self, clear: Callable[[set[nn.Parameter]], None]) -> None:
        """clear: called to discard those of some of the shards"""
        self.clear = clear
        self.shards: set[nn.Parameter] = set()

    def be_of(self, shards: Iterable[nn.Parameter]) -> None:
        """Now these have some."""
        self.shards = set(shards)
        if self.shards:
            _waiting.add(self)
        else:
            _waiting.discard(self)


_waiting: WeakSet[Waiting] = WeakSet()


def check_reduced(shards: Iterable[nn.Parameter], where: str, what: str, allowed: str = _NO_SYNC) -> None:
    """Raises UserError if some of the shards have gradients that wait. what: would become of them"""
    if not _waiting:
        return
    for shard in shards:
        if any(shard in each.shards for each in _waiting):
            raise UserError(
                f"'{shard.shard_of.name}' has gradients of backwards under no_sync, "  # type: ignore[attr-defined]
                f"which {what}",
                where=where,
                allowed=allowed,
            )


def discard(parameters: Iterable[nn.Parameter]) -> None:
    """Discard what waits for these parameters."""
    if not _waiting:
        return
    given = set(parameters)
    for each in list(_waiting):
        if found := each.shards & given:
            each.clear(found)
