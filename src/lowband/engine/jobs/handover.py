"""How a replica that joins gets the state: one that trains offers it, and each rank sends its part."""

import json
import time
from contextlib import suppress
from typing import NamedTuple

import torch
import torch.distributed as dist

from lowband.engine.jobs.life import Member
from lowband.engine.jobs.link import Link
from lowband.engine.jobs.rounds import Record, Rounds
from lowband.engine.jobs.state import Received, State
from lowband.engine.jobs.voice import Voice
from lowband.engine.transport.meeting import Meeting, Tick, as_here
from lowband.errors import UserError


class Joined(NamedTuple):
    """Where a replica goes on that was given the state: after how many steps, and with whom."""

    steps: int
    members: list[Member]


class Handover:
    """One replica's part in it. Every rank of the job must make the same calls."""

    def __init__(
        self, state: State, store: dist.Store, meeting: Meeting, voice: Voice, device: torch.device,
        rank: int, patience_s: float,
    ) -> None:  # fmt: skip
        self._state, self._store, self._meeting, self._voice = state, store, meeting, voice
        self._device, self._rank, self._patience_s = device, rank, patience_s

    def join(self, until: float) -> Joined:
        """Ask until another replica gives its state, which is then in place."""
        while True:
            number, round_ = self._voice.speak("asking to join", Rounds.ask), -1
            while True:
                offer = self._voice.speak("joining", Rounds.offered, number, round_, until)
                if offer is None:
                    break
                round_, text = offer
                if joined := self._receive(number, round_, text):
                    return joined

    def _receive(self, number: int, round_: int, text: str) -> Joined | None:
        """None: the state has not come whole, and nothing is changed."""
        offer = json.loads(text)

        def receive(tick: Tick) -> tuple[Link, Received] | None:
            try:
                link = self._linked(number, round_, 1)
                return link, self._state.receive(offer["state"], link, tick)
            except RuntimeError:
                return None

        received = self._meeting.together("receiving the state", receive)
        if not all(self._meeting.everyone(received is not None)):
            return None
        assert received is not None
        link, state = received
        self._meeting.agree(lambda: self._state.put(state))
        members = [Member(*member) for member in offer["members"]]
        self._voice.speak("following", Rounds.follow, round_, members, offer["asking"])
        with suppress(RuntimeError):  # then it is not expected, and joins once more
            link.send(torch.ones(1))
        return Joined(offer["steps"], members)

    def give(self, number: int, steps: int, record: Record) -> None:
        """Give the state, of so many steps and after this exchange, to the replica of a request."""
        try:
            state = self._meeting.agree(lambda: self._state.content(steps))
        except UserError:  # of this replica, which goes on
            self._voice.speak("giving", Rounds.given, number, False)
            return
        run, began_s = as_here(self._device), time.monotonic()
        offer = {"state": state, "steps": steps, "members": record.members, "asking": record.asking}
        round_ = self._voice.speak("giving", Rounds.offer, number, json.dumps(offer))

        def give(tick: Tick) -> bool:
            def sent() -> None:
                tick()
                self._voice.add(Rounds.gives, number)

            try:
                link = self._linked(number, round_, 0)
                with run():
                    self._state.send(state, link, sent)
                link.receive(torch.empty(1))
            except RuntimeError:
                return False
            return True

        could = self._meeting.together("giving the state", give)
        is_whole = all(self._meeting.everyone(could))
        self._voice.speak("giving", Rounds.given, number, is_whole, time.monotonic() - began_s)

    def _linked(self, number: int, round_: int, place: int) -> Link:
        """Half the patience for the other one to come, because all others wait meanwhile."""
        name = f"state/{number}/{round_}/{self._rank}"
        return Link(self._store, name, place, 2, self._patience_s, come_s=self._patience_s / 2)
