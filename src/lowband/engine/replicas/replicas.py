"""Replicas that meet seldom: when a module's units exchange their weights.

An exchange follows the optimizer's step that completes a period, inside of `optimizer.step()`: the training
loop makes no call that it could forget. Steps of all torch optimizers are counted (units.steps). Several
optimizers may share the module: a step is complete when each trainable parameter has been stepped once.
"""

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import nn

from lowband.engine.collectives.activations import Along
from lowband.engine.replicas.anchor import Anchor
from lowband.engine.replicas.exchange import Exchange
from lowband.engine.replicas.pair import Pair
from lowband.engine.transport.consistency import is_alone
from lowband.engine.transport.everyone import everyones
from lowband.engine.transport.lane import Lanes
from lowband.engine.transport.ledger import Ledger
from lowband.engine.units.unit import Unit
from lowband.errors import UserError
from lowband.spec.activations import ALIKE_GATHER
from lowband.spec.records import Sent
from lowband.spec.sync import Sync

MOST_EXCHANGING = 2  # units at once, without delay, because each holds a difference or an update


class Others(NamedTuple):
    """Replicas that are other jobs: see jobs.quorum.

    before_step: called before each step of an optimizer
    after_step:  called when each parameter has been stepped, before the exchange that may follow
    exchange:    exchanges these with them, given the part of its own weights that a replica keeps, and
                 whether to leave alone those that no replica has moved
    """

    before_step: Callable[[], None]
    after_step: Callable[[], None]
    exchange: Callable[[Sequence[Any], float, bool], None]


class Replicas:
    """The exchanges of one sharded module.

    count:  replicas
    cycle:  optimizer steps after which exchanges repeat: a period, times the turns that partners take
    steps:  optimizer steps since the cycle began
    is_new: whether there was no step yet; the weights may still be loaded, so the anchor is not valid
    """

    def __init__(self, sync: Sync, units: Sequence[Unit], lanes: Lanes) -> None:
        self.sync, self._units, self._lanes = sync, units, lanes
        self.axis = units[0].collectives.axis
        self.axis.has_replicas = True
        kind = Anchor if sync.has_anchor else Pair
        self.exchanges: list[Exchange] = [kind(unit, sync) for unit in units if unit.requires_grad]
        levels = units[0].levels
        self.count = levels.world // levels.size(sync.beyond)
        self.cycle = sync.every * sync.turns(self.count)
        self._fragments: list[list[Exchange]] = [[] for _ in range(sync.fragments)]
        for place, each in enumerate(self.exchanges):
            # A tied unit has other places on other stages, and all of its copies meet after the same steps.
            self._fragments[sync.fragment_of(0 if each.unit.tied is not None else place)].append(each)
        self.steps, self.is_new = 0, True
        self.others: Others | None = None
        self._open = {shard for each in self.exchanges for shard in each.unit.shards}  # not stepped yet
        self._trained = frozenset(self._open)
        self._versions: list[int] = []  # of the units' shards, when they were last as this leaves them
        for each in self.exchanges:
            each.unit.changes.watcher = self

    def before_first_step(self) -> None:
        """Unless there was a step: replicas share the weights. Raises UserError, on every rank, if not."""
        if self.is_new:
            self._check_shared()
            self.begin()

    @torch.no_grad()
    def _check_shared(self) -> None:
        """Weights may be written after `lowband.shard`; replicas that begin with others never agree."""
        if self.others is not None or is_alone() or not self.exchanges:
            return
        sums_of_bits = [each.weights.view(torch.int32).sum(dtype=torch.int64) for each in self.exchanges]
        mine = torch.stack(sums_of_bits).unsqueeze(0)
        device = self._units[0].master.device
        sums = Along(self.axis).gathered(mine.to(device), ALIKE_GATHER, 0, "initial weights").cpu()
        size = len(sums) // self.count  # ranks of a replica, which lie together
        for place, row in enumerate(sums):
            differs = (row != sums[place % size]).nonzero().flatten().tolist()
            if differs:
                ranks, unit = self.axis.ranks, self.exchanges[differs[0]].unit.name
                raise UserError(
                    f"'{unit}' on rank {ranks[place]} has other weights than on rank {ranks[place % size]}",
                    where="the first step of replicas that meet seldom",
                    allowed="the same weights on all replicas; those of a checkpoint by lowband.Checkpointer",
                )

    def before_step(self) -> None:
        self.before_first_step()
        if self.others is not None:
            self.others.before_step()

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
        if self.others is not None:
            self.others.after_step()
        self.advance()
        self._versions = self._present_versions()

    @property
    def is_between_steps(self) -> bool:
        """Whether no parameter has been stepped in a step that others have not taken yet."""
        return len(self._open) == len(self._trained)

    def begin(self) -> None:
        """Begin a period with the present weights, which replicas share, and without momentum."""
        for each in self.exchanges:
            each.begin()
        self.steps, self.is_new = 0, False
        self._versions = self._present_versions()

    def resume(self, steps: int, in_flight: Collection[Exchange]) -> None:
        """Go on with the state of a checkpoint, `steps` after a cycle began.

        in_flight: exchanges of which the checkpoint has the update, which had not arrived
        Under a shorter cycle the next step ends it.
        """
        for each in self.exchanges:
            each.forget()
        self.steps, self.is_new = min(steps, self.cycle - 1), False
        for each in in_flight:
            each.resume()
        self._versions = self._present_versions()

    def check_alone(self, what: str, allowed: str) -> None:
        """Raises UserError if there are replicas that are other jobs."""
        if self.others is not None:
            raise UserError(what, where="lowband.Quorum", allowed=allowed)

    def sent_in_flight(self) -> dict[str, list[Sent]]:
        """Wait for what is on its way; what this rank has sent for it, not counted yet, by unit."""
        moving = [each for each in self.exchanges if each.is_in_flight]
        for each in moving:
            each.update()
        return {each.unit.name: each.sent.read() for each in moving}

    def count_in_flight(self, sent: Mapping[str, Sequence[Sent]]) -> None:
        """After `resume`: what the run before has sent for exchanges that have not arrived."""
        for each in self.exchanges:
            for one in sent.get(each.unit.name, ()):
                each.sent.add(one.level, one.collective, one.wire, int(one.bytes))

    @torch.no_grad()
    def distance(self, stages: int) -> float:
        """How far replicas are apart: the root mean square, over replicas, of their distance from the mean.

        stages: over which the weights lie. Every rank must call it at once. Its bytes are not counted.
        """
        self.check_alone("the other replicas are other jobs", "consensus_distance in a job of all replicas")
        total = torch.zeros((), dtype=torch.float64, device=self._units[0].master.device)
        for each in self.exchanges:
            copies = 1 if each.unit.tied is None else len(each.unit.tied.places)
            total += (each.mean(Ledger()) - each.weights).double().square().sum() / copies
        parts = everyones(float(total))
        ranks = self.axis.ranks if stages == 1 else range(len(parts))
        return sqrt(sum(parts[rank] for rank in ranks) / self.count)

    @torch.no_grad()
    def advance(self) -> None:
        """Count a step; take what arrives after it, then start what is due."""
        sync = self.sync
        period, place = divmod(self.steps, sync.every)
        arriving, starting = sync.arrives(place + 1), sync.starts(place + 1)
        self.steps = (self.steps + 1) % self.cycle
        with self._lanes.exchanging():
            if arriving is not None:
                self._arrive(self._fragments[arriving])
            if starting is not None:  # if it is still on its way, after a checkpoint of another delay
                self._arrive(self._fragments[starting])
            if starting is not None and sync.delay:
                for each in self._fragments[starting]:
                    each.start(is_late=True, number=period)
            elif starting is not None:
                self._exchange(self._fragments[starting], number=period)

    @torch.no_grad()
    def exchange(self) -> None:
        """Exchange the present weights of all replicas, which are equal afterwards; a new period begins.

        Units that no replica has moved since the last exchange are left alone: an outer momentum would move
        them on.
        """
        self.before_first_step()
        with self._lanes.exchanging():
            self._arrive(self.exchanges)
            self.steps = 0
            if self.others is not None:
                self.others.exchange(self.exchanges, 0.0, True)
            else:
                moved = {name for of_rank in everyones(self._moved()) for name in of_rank}
                for each in self.exchanges:
                    if each.unit.name in moved:
                        each.agree()
        self._versions = self._present_versions()

    def _present_versions(self) -> list[int]:
        return [each.unit.changes.version for each in self.exchanges]

    @property
    def is_written(self) -> bool:
        """Whether parameters have been changed since the last step, which what replicas agreed on lacks."""
        return self.sync.has_anchor and not self.is_new and self._versions != self._present_versions()

    def _moved(self) -> list[str]:
        return [each.unit.name for each in self.exchanges if each.has_moved]

    def _arrive(self, exchanges: Sequence[Exchange]) -> None:
        """Wait for those that are on their way, and take the results."""
        for each in exchanges:
            if each.is_in_flight:
                each.finish(self.sync.mix)

    def _exchange(self, exchanges: Sequence[Exchange], number: int) -> None:
        """Start and finish them."""
        if self.others is not None:
            self.others.exchange(exchanges, self.sync.mix, False)
            return
        begun: deque[Exchange] = deque()
        for each in exchanges:
            if len(begun) == MOST_EXCHANGING:
                begun.popleft().finish(self.sync.mix)
            each.start(is_late=False, number=number)
            begun.append(each)
        for each in begun:
            each.finish(self.sync.mix)


def _name(shard: nn.Parameter) -> str:
    name: str = shard.shard_of.name  # type: ignore[attr-defined]
    return name
