"""Rank 0 of a job speaks for its replica at the store; what it is answered, all ranks of the job hear."""

from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

import torch.distributed as dist

from lowband.engine.jobs.life import Member
from lowband.engine.jobs.rounds import Rounds
from lowband.engine.jobs.store import reaching
from lowband.engine.transport.meeting import Meeting, Tick

T = TypeVar("T")
P = ParamSpec("P")


class Voice:
    """A replica's place in the rounds, which its rank 0 has. Every rank must make the same calls."""

    def __init__(self, store: dist.Store, meeting: Meeting) -> None:
        self._store, self._meeting = store, meeting
        self._rounds: Rounds | None = None

    def begin(self, begin: Callable[[], tuple[Rounds, bool]]) -> tuple[Member, bool]:
        """This replica, and whether it is one of those that begin. begin: called on rank 0"""

        def speak(_: Tick) -> tuple[Member, bool]:
            with reaching(self._store):
                self._rounds, begins_here = begin()
                return self._rounds.me, begins_here

        return self._meeting.first("beginning", speak)

    def speak(self, what: str, say: Callable[Concatenate[Rounds, P], T], *said: P.args, **_: P.kwargs) -> T:
        """What rank 0 is answered, on every rank."""

        def speak(tick: Tick) -> T:
            assert self._rounds is not None
            self._rounds.tick = tick
            with reaching(self._store):
                return say(self._rounds, *said, **_)

        return self._meeting.first(what, speak)

    def add(self, say: Callable[Concatenate[Rounds, P], None], *said: P.args, **_: P.kwargs) -> None:
        """Say what needs no answer, on rank 0, while the ranks do not meet."""
        if self._rounds is not None:
            say(self._rounds, *said, **_)
