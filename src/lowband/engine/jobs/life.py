"""Which replicas live, as far as the others can know it from the store (jobs.rounds).

[Note: signs] Of a replica that has not said whether an exchange succeeded, the others cannot tell whether it
has died or still waits for a message: its wait may have begun later, and take as long as theirs. So while its
ranks exchange, a replica gives a sign about once a second, and the others wait for its word until its last
sign is too old. The sign comes from where the ranks of the job meet (transport.meeting), so it ends
when one of them stops.

[Note: the state] A replica that joins is given the state by one that has it. One that was started again has
it no more, nor has one that the others went on without. When none is left that has it, nobody can join. One
that has died and was not started again cannot be told from one that trains.
"""

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist

SIGN_S = 1.0  # between signs, which a slow machine may give later


class Member(NamedTuple):
    """A replica, and how often it has been started."""

    replica: int
    start: int


class Signs:
    """This replica's signs of life, and how long the others have given none. See [Note: signs]."""

    def __init__(self, store: dist.Store, me: Member) -> None:
        """store: used by this object only, because another one's requests may wait for long"""
        self._store, self._me = store, me
        self._given_at = 0.0
        self._heard: dict[Member, tuple[int | None, float]] = {}  # the number of signs, and when it changed

    def begin(self, members: Iterable[Member]) -> None:
        """From now on listen to these."""
        self._given_at = now = time.monotonic()
        self._heard = dict.fromkeys(members, (None, now))

    def give(self) -> None:
        """Give a sign, and listen, unless that was done just now. Without a store it does nothing."""
        if (now := time.monotonic()) - self._given_at < SIGN_S:
            return
        self._given_at = now
        with suppress(dist.DistError):  # whoever needs the store's answer will say so
            self._store.add(_sign(self._me), 1)
            for member, (known, heard_at) in self._heard.items():
                count = self._store.add(_sign(member), 0)
                self._heard[member] = count, heard_at if known in (None, count) else now

    def silence_s(self, member: Member) -> float:
        """Seconds since its last sign."""
        return time.monotonic() - self._heard[member][1]


class Holders:
    """Which replicas have the state. See [Note: the state]."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store

    def started(self, replica: int) -> Member:
        """Note that it was started; it with the number of its starts."""
        member = Member(replica, self._store.add(f"starts/{replica}", 1))
        if member.start == 1:
            self._store.set(f"replica/{self._store.add('replicas', 1)}", str(replica))
        return member

    def has(self, member: Member, round_: int) -> None:
        """Note that it has the state before this round."""
        self._store.set(f"has/{member.replica}", json.dumps([member.start, round_]))

    def gone(self, members: Iterable[Member], round_: int) -> None:
        """Note that they took no part in this round, and nobody waits for them any more."""
        for member in members:
            self._store.set(_gone(member), str(round_))

    def are_all_gone(self, begins: Iterable[int]) -> bool:
        """begins: the replicas that begin, which all will have the state"""
        if not self._store.check([f"has/{replica}" for replica in begins]):
            return False
        started = range(1, self._store.add("replicas", 0) + 1)
        known = [int(self._store.get(f"replica/{n}")) for n in started if self._store.check([f"replica/{n}"])]
        return not any(self._has_still(replica) for replica in known)

    def _has_still(self, replica: int) -> bool:
        if not self._store.check([f"has/{replica}"]):
            return False
        start, round_ = json.loads(self._store.get(f"has/{replica}"))
        key = _gone(Member(replica, start))
        is_gone = self._store.check([key]) and int(self._store.get(key)) >= round_
        return not is_gone and self._store.add(f"starts/{replica}", 0) == start


def _sign(member: Member) -> str:
    return f"sign/{member.replica}.{member.start}"


def _gone(member: Member) -> str:
    return f"gone/{member.replica}.{member.start}"
