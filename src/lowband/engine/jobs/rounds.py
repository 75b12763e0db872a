"""The rounds in which replicas that come and go agree on who takes part, at a key-value store.

One process per replica speaks for it. A round is an exchange between replicas. In an attempt at it

1. each replica says that it is here. The first that sees all whom it expects, or has waited long enough,
   writes the record: who takes part, and who has asked to join. The store takes one record only;
2. those who take part exchange, and each says whether it could. The first that sees the words of all that
   live (jobs.life) writes the verdict. If one could not, those that have spoken try again.

So all replicas that read a verdict read the same one, and nobody applies an exchange that failed for another.
"""

import json
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch.distributed as dist

from lowband.engine.jobs.life import Holders, Member, Signs
from lowband.engine.jobs.store import POLL_S
from lowband.errors import UserError

LEFT = "(left)"
LONGEST_PAUSE_S = 1.0


class Record(NamedTuple):
    """Who takes part in an attempt, in order; the numbers of the requests to join that are open."""

    members: list[Member]
    asking: list[int]


class Verdict(NamedTuple):
    """Whether the exchange holds, and who takes part in the next attempt otherwise."""

    holds: bool
    others: list[Member]


class Rounds:
    """One replica's place in the rounds.

    me:       this replica
    round:    the next one
    expected: who should take part in it
    tick:     called while this process waits
    """

    def __init__(self, store: dist.Store, replica: int, patience_s: float) -> None:
        self._store, self._patience_s = dist.PrefixStore("quorum", store), patience_s
        self._holders = Holders(self._store)
        self.me = self._holders.started(replica)
        self.round, self.attempt = 0, 0
        self.expected: list[Member] = []
        self.tick: Callable[[], None] = lambda: None
        self._answered: set[int] = set()
        self._served: list[int] = []  # requests that were to be served since the last round
        self._signs = Signs(dist.PrefixStore("quorum", store.clone()), self.me)

    def agree(self, what: str, mine: str) -> None:
        """Raises UserError unless this is what the first replica had."""
        if self._store.compare_set(what, "", mine).decode() != mine:
            raise UserError(
                f"{what}: not what the other replicas began with", where=f"replica {self.me.replica}",
                allowed="the same begins, scheme, ranks, module, weights and patience_s on every replica",
            )  # fmt: skip

    def begins(self, begins: Collection[int], state: str) -> bool:
        """Whether this replica is one of those that begin, and none was started before it as the same."""
        key = f"began/{self.me.replica}"
        if self.me.replica not in begins or self._store.check([key]):
            return False
        self.agree("begins", json.dumps(sorted(begins)))
        self.agree("state", state)
        mine = str(self.me.start)
        self.expected = [Member(replica, 0) for replica in sorted(begins)]
        begins_here = self._store.compare_set(key, "", mine).decode() == mine
        if begins_here:
            self._holders.has(self.me, self.round)
        return begins_here

    def wait_for_all(self, until: float) -> None:
        """Return when all that begin have begun. Raises UserError if one has not by then."""
        for i, (replica, _) in enumerate(self.expected):
            for _ in self._waiting():
                if self._store.check([f"began/{replica}"]):
                    break
                if time.monotonic() > until:
                    raise UserError(f"replica {replica} has not begun", where=f"replica {self.me.replica}")
            self.expected[i] = Member(replica, int(self._store.get(f"began/{replica}")))

    # ---- a round

    @property
    def key(self) -> str:
        """Of this attempt."""
        return f"{self.round}.{self.attempt}"

    def assemble(self, units: str) -> tuple[str, Record]:
        """Say that this replica is here; a name for the attempt, and its record.

        units: what it exchanges. Raises UserError if another one exchanges something else.
        """
        self._say("here", units)
        giving, since_s = None, 0.0
        for waited_s in self._waiting():
            if self._has("record"):
                break
            if giving != (giving := self._giving()):  # who gives the state comes later for it
                since_s = waited_s
            missing = [member for member in self._awaited() if not self._has("here", member)]
            if not missing or waited_s - since_s > self._patience_s + self._late_s():
                here = [m for m in self.expected if self._has("here", m) and self._said("here", m) != LEFT]
                asking = [number for number in self._open() if self.asker(number) not in here]
                self._write("record", [here, asking])
        found, asking = self._read("record")
        members = [Member(*member) for member in found]
        self._signs.begin(members)
        for member in members:
            if self.me in members and self._said("here", member) != units:
                raise UserError(
                    f"replica {member.replica} exchanges other units", where=f"replica {self.me.replica}",
                    allowed="lowband.sync_replicas on all replicas after the same step, or on none",
                )  # fmt: skip
        return self.key, Record(members, asking)

    def live(self) -> None:
        """Say that this replica lives; to be called again and again while it exchanges."""
        self._signs.give()

    def vote(self, record: Record, could: bool) -> Verdict:
        """Say whether the exchange succeeded here; whether it did everywhere."""
        self._say("could", "yes" if could else "no")
        for _ in self._waiting():
            if self._has("verdict"):
                break
            self.live()
            missing = [member for member in record.members if not self._has("could", member)]
            # Asked again after its silence: it may have said so since.
            if all(self._is_silent(member) and not self._has("could", member) for member in missing):
                said = {m: self._said("could", m) for m in record.members if m not in missing}
                holds = not missing and "no" not in said.values()
                self._write("verdict", [holds, list(said)])
        holds, others = self._read("verdict")
        return Verdict(holds, [Member(*member) for member in others])

    def _is_silent(self, member: Member) -> bool:
        """Whether it is waited for no longer. See jobs.life, [Note: signs]."""
        return self._signs.silence_s(member) > self._patience_s + 2 * LONGEST_PAUSE_S

    def again(self, verdict: Verdict) -> None:
        """Go on to the round's next attempt."""
        self._holders.gone(set(self.expected) - {*verdict.others}, self.round)
        self.attempt += 1
        self.expected = verdict.others

    def over(self, record: Record) -> None:
        """Go on to the next round, for which those who asked to join are expected."""
        self._holders.gone(set(self.expected) - {*record.members}, self.round)
        self.follow(self.round + 1, record.members, record.asking)

    def follow(self, round_: int, members: list[Member], asking: list[int]) -> None:
        """Go on to a round."""
        self._holders.has(self.me, round_)
        self.round, self.attempt, self._served = round_, 0, asking
        self.expected = sorted({*members, *(self.asker(number) for number in asking)})

    def leave(self) -> None:
        """Say that this replica is not coming."""
        self._say("here", LEFT)
        self._holders.gone([self.me], self.round)
        self._store.set("leaving", json.dumps([self.round, self.expected]))
        self._store.set(f"left/{self.me.replica}.{self.me.start}", "")

    def _over(self) -> int | None:
        """The number of rounds, if all who were expected last have left, except this replica."""
        if not self._store.check(["leaving"]):
            return None
        rounds, expected = json.loads(self._store.get("leaving"))
        others = [f"left/{replica}.{start}" for replica, start in expected if replica != self.me.replica]
        return int(rounds) if not others or self._store.check(others) else None

    def _nobody_is_left(self) -> bool:
        has_begun = self._store.check(["begins"])
        return has_begun and self._holders.are_all_gone(json.loads(self._store.get("begins")))

    def _awaited(self) -> list[Member]:
        """Those that may come: none that was started again, and none that could not be given the state."""
        askers = {self.asker(number) for number in self._open() if number not in self._served}
        again = {asker.replica for asker in askers.difference(self.expected)}  # not of one whose giver died
        failed = {self.asker(number) for number in self._served if self.was_given(number) is False}
        return [m for m in self.expected if m == self.me or not (m.replica in again or m in failed)]

    def _late_s(self) -> float:
        """How much later than the others those come that gave the state since the last round, and had it."""
        took = [f"took/{number}" for number in self._served]
        return sum(float(self._store.get(key)) for key in took if self._store.check([key]))

    def _giving(self) -> list[tuple[int, bool | None]]:
        """How far the requests are that were to be served since the last round."""
        return [(self._store.add(f"giving/{number}", 0), self.was_given(number)) for number in self._served]

    # ---- requests to join

    def ask(self) -> int:
        """Ask to join; the request's number."""
        number = self._store.add("asks", 1)
        self._store.set(f"ask/{number}", json.dumps(self.me))
        return number

    def asker(self, number: int) -> Member:
        return Member(*json.loads(self._store.get(f"ask/{number}")))

    def offer(self, number: int, content: str) -> int:
        """Offer the state to the replica that asked; the round before which it holds."""
        self._store.set(f"content/{number}/{self.round}", content)
        self._store.set(f"offer/{number}", str(self.round))
        return self.round

    def offered(self, number: int, before: int, until: float) -> tuple[int, str] | None:
        """The round of the next offer after an earlier one, and what it says; None if one has to ask anew.

        Raises UserError if the run is over, nobody is left who could, or nobody offers anything until then.
        """
        for _ in self._waiting():
            if self._store.check([f"offer/{number}"]) and self._round_of(number) > before:
                break
            if self.was_given(number) is False:
                return None
            where = f"replica {self.me.replica}"
            if (rounds := self._over()) is not None:
                raise UserError(f"the run is over: all replicas left after {rounds} rounds", where=where)
            if self._nobody_is_left():
                raise UserError(
                    "no replica is left that has the state: all have ended", where=where,
                    allowed="with a new store, checkpoints of the same step on every replica",
                )  # fmt: skip
            if time.monotonic() > until:
                raise UserError(
                    "no replica has let it join", where=where,
                    allowed="another replica that trains; a store of its own for another run",
                )  # fmt: skip
        round_ = self._round_of(number)
        return round_, self._store.get(f"content/{number}/{round_}").decode()

    def gives(self, number: int) -> None:
        """Note that giving the state goes on."""
        self._store.add(f"giving/{number}", 1)

    def given(self, number: int, is_whole: bool, took_s: float = 0.0) -> None:
        """Note that the state was given, or could not be, in so many seconds."""
        self._store.set(f"took/{number}", str(took_s))
        self._store.set(f"given/{number}", "yes" if is_whole else "no")

    def was_given(self, number: int) -> bool | None:
        """None: not yet."""
        known = self._store.check([f"given/{number}"])
        return self._store.get(f"given/{number}") == b"yes" if known else None

    def _round_of(self, number: int) -> int:
        return int(self._store.get(f"offer/{number}"))

    def _open(self) -> list[int]:
        """The requests that nobody has answered."""
        made = self._store.add("asks", 0)
        waiting = [
            n for n in range(1, made + 1) if n not in self._answered and self._store.check([f"ask/{n}"])
        ]
        self._answered |= {n for n in waiting if self.was_given(n) is not None}
        return [n for n in waiting if n not in self._answered]

    # ---- the store

    def _key(self, what: str, member: Member | None = None) -> str:
        return f"{self.key}/{what}" + ("" if member is None else f"/{member.replica}.{member.start}")

    def _say(self, what: str, text: str) -> None:
        self._store.set(self._key(what, self.me), text)

    def _has(self, what: str, member: Member | None = None) -> bool:
        return bool(self._store.check([self._key(what, member)]))

    def _said(self, what: str, member: Member) -> str:
        return str(self._store.get(self._key(what, member)).decode())

    def _write(self, what: str, value: object) -> None:
        """Unless another replica has."""
        self._store.compare_set(self._key(what), "", json.dumps(value))

    def _read(self, what: str) -> tuple[Any, Any]:
        first, second = json.loads(self._store.get(self._key(what)))
        return first, second

    def _waiting(self) -> Iterator[float]:
        """Seconds waited so far; the pauses between them grow, because a store may be far away."""
        began = time.monotonic()
        while True:
            yield (waited_s := time.monotonic() - began)
            self.tick()
            time.sleep(min(max(POLL_S, 0.05 * waited_s), LONGEST_PAUSE_S))
