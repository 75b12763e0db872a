"""Seconds of a collective: base + steps x latency + bytes / rate, hop by hop, as one flat ring, or joined.

    hops   sum over hops of   pieces (base + (n - 1) latency(level)) + bytes / rate(level)
    flat   pieces (base + sum over levels of steps(level) latency(level))
           + all bytes / min(rate(level) x ranks inside)
    joined pieces (base + sum over levels of partners(level) latency(level)) + sum of bytes / rate(level)

pieces: into how many collectives the stack cuts one (DeepSpeed gathers weight by weight). An all-reduce is
two rounds of a ring, so it takes its steps twice. rate is the link's rate x its efficiency. A flat ring
crosses a level's boundary once per inner group, so it can use the cards of all ranks of that group: its
rate there is their combined rate. steps(level) of a ring over counts n1 (inner), n2, ... is (n_i - 1) x
product of the counts outside. In joined hops a rank's messages leave one after the other, partners(i) =
(n_i - 1) x product of the counts inside of them across level i: over equal links as in one hop among all.
Message size enters through the latency: half the rate is reached at latency x rate bytes per step. Source:
Hockney's model with the steps of ring collectives (Thakur, Rabenseifner and Gropp 2005); the latencies by
level are those of NCCL's and RCCL's own tuners.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from lowband.cost.bytes import Transfer
from lowband.cost.numbers import GIGA, Num
from lowband.spec.machine import Machine
from lowband.spec.mesh import Hop, Joined
from lowband.spec.sourced import Bound, Fact
from lowband.spec.stack import ANY, Stack
from lowband.spec.step import Pattern, pattern_of

Case = Literal["slow", "value", "fast"]  # slow, fast: every constant at that end of its interval
# By case, the end of an interval: of an efficiency or a rate, and of a count or a time.
LOW_IS_SLOW: dict[Case, Bound] = {"slow": "low", "value": "value", "fast": "high"}
HIGH_IS_SLOW: dict[Case, Bound] = {"slow": "high", "value": "value", "fast": "low"}
MICRO = 1e-6


def share(fact: Fact | None, case: Case) -> float:
    """An efficiency; 1 if none is stated."""
    return 1.0 if fact is None else fact.at(LOW_IS_SLOW[case])


def number(fact: Fact | None, case: Case) -> float:
    """A count; 1 if none is stated."""
    return 1.0 if fact is None else fact.at(HIGH_IS_SLOW[case])


def seconds(fact: Fact | None, case: Case) -> float:
    """A time in microseconds, in seconds; 0 if none is stated."""
    return 0.0 if fact is None else fact.at(HIGH_IS_SLOW[case]) * MICRO


def _between(known: Mapping[int, float], count: int) -> float:
    """The factor at a count, interpolated in the count's logarithm; 1 if none is known."""
    if not known:
        return 1.0
    below = max((n for n in known if n <= count), default=min(known))
    above = min((n for n in known if n >= count), default=max(known))
    if below == above:
        return known[below]
    return known[below] + math.log(count / below, above / below) * (known[above] - known[below])


@dataclass(frozen=True)
class Network:
    """A machine's links under a stack, as inputs to the formulas.

    faster: level -> factor on the rate of its link, for a grid of what-ifs
    shards: true for the collectives of sharding, which reach only a share of the link's rate, stated by the
            stack; false for those of tensor and pipeline parallelism, which reach the full rate
    own:    how collectives run; None: as the stack runs them
    """

    machine: Machine
    stack: Stack
    case: Case = "value"
    faster: Mapping[str, Num] = field(default_factory=dict)
    shards: bool = True
    own: Pattern | None = None

    @property
    def base_s(self) -> float:
        return seconds(self.stack.collective_us, self.case)

    @property
    def pattern(self) -> Pattern:
        return self.own or self.stack.collectives

    def latency_s(self, level: str) -> float:
        return seconds(self.machine.link(level).latency_us, self.case)

    def rate(self, level: str) -> Num:
        """Bytes per second that a rank can send over a level."""
        link = self.machine.link(level)
        own = link.gigabytes_per_s * GIGA * share(link.efficiency, self.case)
        by_cards = {cards: share(fact, self.case) for cards, fact in link.efficiency_by_cards.items()}
        own *= _between(by_cards, link.cards or 1)
        if self.shards:
            stated = self.stack.efficiency
            own *= share(stated.get(level, stated.get(ANY)), self.case)
        return own * self.faster.get(level, 1.0)

    def hop_s(self, hop: Hop, sent: Num, pieces: float = 1) -> Num:
        """Seconds of one hop in which each rank sends `sent` bytes in total, in `pieces` collectives."""
        fixed = self.base_s + (hop.count - 1) * self.latency_s(hop.level)
        return pieces * fixed + sent / self.rate(hop.level)

    def ring_s(self, hops: Sequence[Hop], sent: Num, pieces: float = 1, rounds: int = 1) -> Num:
        """Seconds of one flat ring over all hops' partners (inner first); each rank sends `sent` bytes.

        rounds: 2 for an all-reduce, which reduces in one round and gathers in another
        """
        steps = 0.0
        outside = 1
        for hop in reversed(hops):
            steps += (hop.count - 1) * outside * self.latency_s(hop.level)
            outside *= hop.count
        rates = [self.rate(hop.level) * hop.stride / hops[0].stride for hop in hops]
        slowest = rates[0]
        for rate in rates[1:]:
            slowest = np.minimum(slowest, rate)
        return pieces * (self.base_s + rounds * steps) + sent / slowest

    def pass_on_s(self, hops: Sequence[Hop], sent: Num) -> Num:
        """Seconds in which every rank of a ring over all hops' partners (inner first) sends `sent` bytes to
        the next one: the slowest link decides. Of an inner group one rank sends outside, and may use what
        its neighbours leave: in a box all of it, else of the network cards that they share its own."""
        slowest: Num = 0.0
        for hop in hops:
            slowest = np.maximum(slowest, self.message_s(hop, hop.stride // hops[0].stride, sent))
        return self.base_s + slowest

    def message_s(self, hop: Hop, neighbours: int, sent: Num) -> Num:
        """Seconds of one message over a hop's level, while its sender's neighbours, so many with it, rest."""
        rate = self.rate(hop.level) * min(neighbours, self._ranks_of_a_card(hop.level))
        return self.latency_s(hop.level) + sent / rate

    def _ranks_of_a_card(self, level: str) -> float:
        """Ranks whose shares make up one card; in a box, whose links are shaped by group, any number."""
        if self.machine.box is not None:
            return math.inf
        names = [each.name for each in self.machine.levels]
        inside, cards = names.index(level) - 1, self.machine.link(level).cards
        group = 1 if inside < 0 else self.machine.levels[inside].size or 1
        return 1 if cards is None else max(1, group / cards)

    def joined_s(self, joined: Joined, sent: Num, pieces: float = 1, rounds: int = 1) -> Num:
        """Seconds of joined hops in which each rank sends `sent` bytes; rounds: 2 for an all-reduce"""
        shares = joined.shares(None)
        steps = sum(
            float(share * (joined.hop.count - 1)) * self.latency_s(level) for level, share in shares.items()
        )
        total: Num = pieces * rounds * (self.base_s + steps)
        for level, share in shares.items():
            total = total + float(share) * sent / self.rate(level)
        return total

    def all_reduce_s(self, hops: Sequence[Hop], values_bytes: Num) -> Num:
        """Seconds to all-reduce so many bytes over all hops' partners (inner first): a reduce-scatter and a
        gather, each on what the hops inside have left of it."""
        ranks = math.prod(hop.count for hop in hops)
        sent = 2 * (ranks - 1) / ranks * values_bytes
        if self.pattern == "flat":
            return self.ring_s(hops, sent, rounds=2)
        if self.pattern == "joined":
            return self.joined_s(Joined(tuple(hops)), sent, rounds=2)
        total: Num = 0.0
        for hop in hops:
            left = values_bytes * hops[0].stride / hop.stride
            total = total + 2 * self.hop_s(hop, left * (hop.count - 1) / hop.count)
        return total

    def collective_s(self, parts: Sequence[Transfer], pieces: float = 1) -> Num:
        """Seconds of one collective of one unit, given its hops."""
        if len(parts) > 1:
            kind, is_plain = parts[0].collective.kind, parts[0].wire == "native"
            pattern = pattern_of(self.pattern, kind, is_plain)
            if pattern != "hops":
                hops = sorted({part.hop for part in parts}, key=lambda hop: hop.stride)
                sent = sum(part.sent_bytes for part in parts)
                rounds = len(parts) // len(hops)
                if pattern == "joined":
                    return self.joined_s(Joined(tuple(hops)), sent, pieces, rounds)
                return self.ring_s(hops, sent, pieces, rounds)
        total: Num = 0.0
        for part in parts:
            total = total + self.hop_s(part.hop, part.sent_bytes, pieces)
        return total
