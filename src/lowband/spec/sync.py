"""How replicas that do not average gradients exchange their weights: every so many optimizer steps."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from lowband.spec.yaml_model import Younger

Outer = Literal["average", "momentum", "nesterov"]
Partners = Literal["all", "exponential", "ring"]

MOST_FRAGMENTS = 1000  # no model has as many units


class Sync(Younger):
    """`sync` of a scheme. A replica is a group of ranks that average their gradients in every step.

    Every H steps replicas exchange how far their weights have moved from the anchor, the weights that they
    agreed on last. The mean, d, is the gradient of an outer optimizer, whose result is the new anchor:

        average    anchor -= d                               Local SGD (Stich, arXiv 1805.09767)
        momentum   v = momentum v + d                        SlowMo (arXiv 1910.00643)
                   anchor -= learning_rate v
        nesterov   v = momentum v + d                        DiLoCo (arXiv 2311.08105)
                   anchor -= learning_rate (d + momentum v)

    `average` keeps no v. An exchange that starts after step t arrives after step t + delay; then, on each
    replica (Streaming DiLoCo, arXiv 2501.18512, Algorithm 2, with tau = delay and alpha = mix),

        weights = mix weights + (1 - mix) anchor

    d is of the weights at step t; with mix 0 the steps since then count for nothing. Of what arrives and what
    starts after the same step, the former comes first.

    With fragments, units are dealt out to them in turn, as Streaming DiLoCo's strided fragments are, and each
    fragment has exchanges of its own every H steps, the first one after (f + 1) H / fragments steps. A scheme
    without `sync` averages gradients over all ranks in every step.

    That is with all replicas as partners. With `partners` there is no anchor, and replicas never agree: in
    exchange k = 0, 1, ... each sends its weights to one of the n replicas and averages its own with those of
    another one, or the same,

        exponential  replica i sends to i + 2^(k mod ceil(log2 n)) and receives from as many before it, modulo
                     n: the one-peer exponential graph (Ying et al., arXiv 2110.13363)
        ring         0 and 1, 2 and 3, ... average when k is even; 1 and 2, ..., n - 1 and 0 when it is odd

        weights = (weights at the start + weights received) / 2 + what training has changed since the start

    Every step, with Adam inside, this is decentralised Adam (Wang et al., arXiv 2410.11998), whose exchanges
    run behind the next step: delay 1.
    """

    younger: ClassVar = ("fragments", "delay", "mix", "partners")  # what later and partial exchanges have

    beyond: str = Field(description="level of a replica; replicas are the groups of that level")
    every: PositiveInt = Field(description="H, optimizer steps from one exchange to the next")
    fragments: PositiveInt = Field(
        default=1, le=MOST_FRAGMENTS, description="parts of the units that are exchanged in turn"
    )
    delay: NonNegativeInt = Field(default=0, description="optimizer steps from its start to its arrival")
    mix: float = Field(default=0.0, ge=0, lt=1, description="part of its own weights that a replica keeps")
    partners: Partners = Field(default="all", description="with whom a replica exchanges weights")
    outer: Outer = Field(default="average", description="the outer optimizer")
    learning_rate: PositiveFloat = Field(default=1.0, description="of the outer optimizer")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="of the outer optimizer")

    @model_validator(mode="after")
    def _fits(self) -> "Sync":
        if self.outer == "average" and (self.learning_rate != 1 or self.momentum != 0):
            raise ValueError(
                "outer average has neither learning_rate nor momentum (allowed: outer momentum or nesterov)"
            )
        if self.outer != "average" and self.momentum == 0:
            raise ValueError(f"outer {self.outer} has a momentum above 0 (allowed: outer average without)")
        if self.every % self.fragments:
            possible = ", ".join(str(n) for n in range(1, MOST_FRAGMENTS + 1) if self.every % n == 0)
            raise ValueError(
                f"fragments ({self.fragments}) do not divide the period of {self.every} steps "
                f"(allowed: {possible})"
            )
        if self.delay > self.every:
            raise ValueError(f"delay ({self.delay}) is longer than the period (allowed: 0 to {self.every})")
        if not self.has_anchor and (self.outer != "average" or self.mix):
            raise ValueError(
                f"partners {self.partners}: replicas average weights, by twos (allowed: no outer and no mix)"
            )
        if self.delay == self.every and not self.mix and self.has_anchor:
            raise ValueError(
                f"with delay {self.delay} and mix 0 each exchange starts when the one before has replaced "
                f"the weights: no step would count (allowed: delay below {self.every}, or mix above 0)"
            )
        return self

    @property
    def has_anchor(self) -> bool:
        """Whether replicas agree on weights; with one partner at a time they never do."""
        return self.partners == "all"

    @property
    def has_momentum(self) -> bool:
        """Whether the outer optimizer keeps a state."""
        return self.outer != "average"

    def turns(self, replicas: int) -> int:
        """Exchanges after which partners repeat."""
        return {"all": 1, "exponential": max(1, (replicas - 1).bit_length()), "ring": 2}[self.partners]

    def partner(self, replica: int, replicas: int, exchange: int) -> tuple[int, int]:
        """To whom a replica sends in an exchange, and from whom it receives. replicas: even in a ring"""
        if self.partners == "ring":
            odd = exchange % 2
            other = (((replica + odd) ^ 1) - odd) % replicas
            return other, other
        distance = 2 ** (exchange % self.turns(replicas))
        return (replica + distance) % replicas, (replica - distance) % replicas

    @property
    def gap(self) -> int:
        """Optimizer steps from the start of one fragment's exchange to that of the next one's."""
        return self.every // self.fragments

    def fragment_of(self, unit: int) -> int:
        """The fragment of a unit, given its place among those that are trained; the root's is 0."""
        return unit % self.fragments

    def starts(self, place: int) -> int | None:
        """The fragment whose exchange starts after a step. place: the step's in its period, 1 to `every`"""
        return None if place % self.gap else place // self.gap - 1

    def arrives(self, place: int) -> int | None:
        """The fragment whose exchange, if one is on its way, arrives after a step; none without delay."""
        return self.starts((place - self.delay - 1) % self.every + 1) if self.delay else None

    def most_in_flight(self, units: Sequence[int]) -> int:
        """The most of these sizes, one per unit, whose exchanges are on their way at once."""
        sizes = [sum(units[fragment :: self.fragments]) for fragment in range(self.fragments)]
        at_once = -(-self.delay // self.gap)
        return max(sum((sizes * 2)[first : first + at_once]) for first in range(self.fragments))
