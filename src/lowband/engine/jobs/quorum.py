"""Replicas that are jobs of their own, which may end at any time, and may join the others again.

A replica's ranks are one job with its own process group. The same rank of each job holds the same shard, so
an exchange is between these ranks: rank 3 of one job with rank 3 of the others. The replicas that are there
take part in it (jobs.rounds), and the mean is over them. One that joins is given the state of one
that trains: weights, anchor, the outer optimizer's momentum, the inner optimizer's state.

[Note: whole] Each job has the whole outer momentum, so that nothing is lost with another job. In one job of
several replicas (replicas.anchor) it is divided among all ranks.
"""

import hashlib
import time
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from lowband.engine.jobs.check import check_weights, checked, job_text
from lowband.engine.jobs.handover import Handover
from lowband.engine.jobs.life import Member
from lowband.engine.jobs.link import Link
from lowband.engine.jobs.rounds import Record, Rounds
from lowband.engine.jobs.state import State
from lowband.engine.jobs.store import open_store
from lowband.engine.jobs.voice import Voice
from lowband.engine.passes.engine import engine_of
from lowband.engine.replicas.anchor import Anchor
from lowband.engine.replicas.replicas import Others
from lowband.engine.transport.axis import world_timeout
from lowband.engine.transport.meeting import Context, Meeting, Tick, as_here
from lowband.errors import UserError
from lowband.spec.step import SYNC_REDUCE

MOST_REPLICAS = 2**16
MOST_ATTEMPTS = 10  # at one exchange; each that fails may have lost a replica


class Quorum:
    """The replicas of a run, as one of them sees it.

        store = lowband.Quorum.store("head:29400")
        quorum = lowband.Quorum(model, optimizer, store, replica=2, begins=range(4))
        while quorum.steps < 1000:
            ...
            optimizer.step()  # every H-th one exchanges with the replicas that are there
            optimizer.zero_grad()
        quorum.leave()

    members:    the replicas of the last exchange, in order; one that has joined since is not among them
    steps:      optimizer steps of the run so far; a replica that joins has the others'
    sent_bytes: by this rank, to other replicas, for exchanges
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        store: dist.Store,
        replica: int,
        begins: Collection[int] = (),
        patience_s: float = 60.0,
        join_s: float = 3600.0,
        also: Mapping[str, Any] | None = None,
        steps: int = 0,
    ) -> None:
        """
        module:     sharded under a scheme with sync, on a job that is one replica
        optimizer:  of all its trainable parameters
        store:      a TCPStore that all ranks of all replicas reach, e.g. `Quorum.store`. The process that
                    hosts it must outlive the replicas
        replica:    this job's number, which no other job has at the same time
        begins:     the replicas that begin, the same on each of them. One that is started again joins
        patience_s: how long an exchange waits for a replica, longer if one was given the state meanwhile, and
                    for each message; the same on all replicas
        join_s:     how long those that begin wait for each other, and one that joins for an exchange
        also:       what else it is given: objects with `state_dict` and `load_state_dict`, in values that
                    JSON can represent, by name; e.g. {"scheduler": scheduler}
        steps:      of a run whose replicas all go on from checkpoints: the step of these

        Every rank of the job must make it, after the weights are loaded and before the first step. For a
        replica that joins it returns when the state is there. Raises UserError for a scheme or a job that
        does not allow it, for replicas that differ or do not begin, and if none lets it join.
        """
        if not 0 <= replica < MOST_REPLICAS:
            raise UserError(f"replica {replica}", where="Quorum", allowed=f"0 to {MOST_REPLICAS - 1}")
        if patience_s <= 0 or join_s <= 0:
            raise UserError(
                f"patience_s {patience_s}, join_s {join_s}", where="Quorum", allowed="numbers above 0"
            )
        engine = engine_of(module)
        self._engine = engine
        self._replicas, self._rank = checked(engine, optimizer), engine.axis.rank
        self._checks_weights = self._replicas.is_new  # until the first step
        self._replicas.before_first_step()  # the present weights are the anchor
        scheme = engine.collectives.scheme
        self._wire, self._block_size = scheme.wire(SYNC_REDUCE.name), scheme.block_size
        self._state = State(module, optimizer, also or {})
        self._store, self._patience_s = store, patience_s
        timeout_s = world_timeout().total_seconds()
        self._meeting = Meeting(timeout_s, progress_s=timeout_s + 10 * patience_s)
        self._link: Link | None = None  # with those of the last exchange
        self._record = Record([], [])  # of the last exchange
        self._failure = "on another rank"  # of this rank's last attempt that failed
        self.steps, self.sent_bytes = steps, 0
        self._meeting.agree(lambda: self._state.content(steps))  # what could not be given is refused here
        sums = self._meeting.everyone(f"{steps} {self._state.sum(not self._checks_weights)}")
        state = hashlib.sha256("".join(sums).encode()).hexdigest()

        def begin() -> tuple[Rounds, bool]:
            rounds = Rounds(store, replica, patience_s)
            rounds.agree("scheme, ranks, units and optimizer", job_text(engine, optimizer))
            rounds.agree("patience_s", str(float(patience_s)))
            return rounds, rounds.begins(begins, state)

        self._voice = Voice(store, self._meeting)
        self._handover = Handover(
            self._state, store, self._meeting, self._voice, engine.device, self._rank, patience_s
        )
        self._me, begins_here = self._voice.begin(begin)
        until = time.monotonic() + join_s
        if begins_here:
            self._voice.speak("beginning", Rounds.wait_for_all, until)
        else:
            self.steps, members = self._handover.join(until)
            self._record, self._checks_weights = Record(members, []), False
        self._replicas.others = Others(self._before_step, self._after_step, self._exchange)

    store = staticmethod(open_store)

    @property
    def members(self) -> list[int]:
        """The replicas of the last exchange, in order."""
        return [member.replica for member in self._record.members]

    def leave(self) -> None:
        """Take no part any more, after the last step. Without this call the others wait for `patience_s`.

        Every rank of the job must call it. A replica that has asked to join is given the state first.
        """
        self._give_state()
        self._voice.speak("leaving", Rounds.leave)
        self._replicas.others = Others(self._has_left, self._has_left, self._has_left)

    def _has_left(self, *_: object) -> NoReturn:
        raise UserError(
            "it has left, and would go on alone",
            where=f"replica {self._me.replica}",
            allowed="no step after leave",
        )

    # ---- called by Replicas

    def _before_step(self) -> None:
        if self._checks_weights:
            self._meeting.agree(lambda: check_weights(self._replicas))
            self._checks_weights = False
        if self._replicas.is_between_steps:
            self._give_state()

    def _after_step(self) -> None:
        self.steps += 1

    def _give_state(self) -> None:
        """Give those that have asked to join the state, which is what it will be before their first step."""
        record, self._record = self._record, self._record._replace(asking=[])
        if record.asking and record.members[0] == self._me:
            for number in record.asking:
                self._handover.give(number, self.steps, record)

    def _exchange(self, anchors: Sequence[Anchor], mix: float, is_asked: bool) -> None:
        """Exchange with the replicas that are there. is_asked: by `sync_replicas`, not at a period's end: an
        outer momentum does not move on what no replica has moved.

        Raises UserError if they have given up on this one. It cannot be given their state here, in the midst
        of its own step.
        """
        self._give_state()
        self._meeting.everyone(None)  # a replica is here when all its ranks are
        units = " ".join([*(anchor.unit.name for anchor in anchors), *(["asked"] if is_asked else [])])
        run = as_here(self._engine.device)
        for _ in range(MOST_ATTEMPTS):
            key, record = self._voice.speak("meeting", Rounds.assemble, units)
            self._check_place(record.members)
            exchange = partial(self._means, key, record, anchors, run)
            means = self._meeting.together("exchanging", exchange, lambda: self._voice.add(Rounds.live))
            could = all(self._meeting.everyone(means is not None))
            verdict = self._voice.speak("agreeing", Rounds.vote, record, could)
            if verdict.holds:
                break
            self._link = None
            self._check_place(verdict.others)
            self._voice.speak("trying again", Rounds.again, verdict)
        else:
            raise RuntimeError(f"{MOST_ATTEMPTS} attempts at an exchange failed: {self._failure}")
        assert means is not None  # it is nowhere, if the exchange holds
        moved = [not is_asked or bool(mean.any()) for mean in means]  # of this rank's pieces
        steps = [any(of_ranks) for of_ranks in zip(*self._meeting.everyone(moved), strict=True)]
        for anchor, mean, is_step in zip(anchors, means, steps, strict=True):
            anchor.bring(mean, is_step)
        for anchor in anchors:
            anchor.finish(mix)
        self._record = record
        self._voice.speak("going on", Rounds.over, record)

    def _check_place(self, members: Sequence[Member]) -> None:
        if self._me not in members:
            raise UserError(
                f"the others went on without it after {self.steps} steps",
                where=f"replica {self._me.replica}",
                allowed="to be started again, and to join them; a longer patience_s",
            )  # fmt: skip

    def _means(
        self, key: str, record: Record, anchors: Sequence[Anchor], run: Context, tick: Tick
    ) -> list[torch.Tensor] | None:
        """By unit, the mean of how far replicas have moved, 1D, of this rank's piece; None without one."""
        try:
            if self._link is None or record.members != self._record.members:
                place = record.members.index(self._me)
                name = f"round/{key}/{self._rank}"
                self._link = Link(self._store, name, place, len(record.members), self._patience_s)
            before, means = self._link.sent_bytes, []
            for anchor in anchors:
                with run():
                    means.append(self._link.mean(anchor.moved(), self._wire, self._block_size))
                tick()
        except RuntimeError as error:  # gloo's
            self._link, self._failure = None, str(error).splitlines()[0]
            return None
        self.sent_bytes += self._link.sent_bytes - before
        return means
