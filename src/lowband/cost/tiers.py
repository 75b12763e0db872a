"""What states cost that lie in the host's memory or on a disk, in closed form.

Efficiency of a tier (ZeRO-Infinity, arXiv 2104.07857, section 4): a byte of a state that is moved must be
worth enough FLOPs. Per byte, with B S tokens on a device and recomputation, 8 N B S FLOPs of N parameters,

    weights, gradients   B S       16 bits: fetched in forward, recomputation and backward; gradients leave
    optimizer            B S / 4   16 bytes a parameter (weights, gradients, moments in fp32), in and out
    activations          24 D c    those of every c-th of blocks of width D, out in forward, in for backward

and where nothing overlaps, a device of P FLOP/s that gets W bytes a second is busy i W / (i W + P) of the
time at i FLOPs a byte.

Copies (bytes a second of a rank): alone a rank has its link; ranks of a node that copy at once share what the
node can, in equal parts.

Adam's update reads weights, gradients and both moments, and writes all but gradients: 28 bytes a parameter in
fp32, at the rate of the host's memory that its cores reach. A part of the parameters may be updated on the
device instead: of a share `share` beyond the device every `stride`-th subgroup (Twin-Flow; Deep Optimizer
States, arXiv 2410.21316), for which 12 bytes come and 12 go.
"""

from dataclasses import dataclass
from typing import Literal

from lowband.cost.memory import ADAM_MOMENT_BYTES, GRAD_BYTES, MASTER_BYTES
from lowband.cost.numbers import Num
from lowband.spec.machine import Tier
from lowband.spec.sourced import Bound, Fact

State = Literal["weights", "optimizer", "activations"]
STATES: tuple[State, ...] = ("weights", "optimizer", "activations")

UPDATE_BYTES = 2 * (MASTER_BYTES + ADAM_MOMENT_BYTES) + GRAD_BYTES  # read and written by an update
MOVED_BYTES = MASTER_BYTES + ADAM_MOMENT_BYTES  # of a parameter that is updated elsewhere, each way
GIGA = 1e9


def intensity(state: State, tokens: Num, hidden: int, every: int = 1) -> Num:
    """FLOPs per byte of a state. tokens: of a device and step; every: blocks for each checkpoint"""
    if state == "activations":
        return 24.0 * hidden * every
    return tokens / 4 if state == "optimizer" else tokens


def efficiency(flops_per_byte: Num, bytes_per_s: Num, flops_per_s: float) -> Num:
    """The share of `flops_per_s` that a device reaches whose state arrives at `bytes_per_s`, unhidden."""
    worth = flops_per_byte * bytes_per_s
    return worth / (worth + flops_per_s)


@dataclass(frozen=True)
class Rates:
    """10^9 bytes a second of one rank, where `ranks` of its node copy or update at once."""

    fetch: Num
    stash: Num
    update: Num  # 0: nothing is updated there

    @staticmethod
    def of(tier: Tier, ranks: int, bound: Bound = "value") -> "Rates":
        """Of a tier's facts. ranks: of the node, that copy at once"""

        def shared(alone: Fact, together: Fact | None) -> float:
            rate = alone.at(bound)
            return rate if together is None else min(rate, together.at(bound) / ranks)

        update = tier.update_gigabytes_per_s
        updated = 0.0 if update is None else shared(update, tier.node_update_gigabytes_per_s)
        return Rates(
            shared(tier.fetch_gigabytes_per_s, tier.node_fetch_gigabytes_per_s),
            shared(tier.stash_gigabytes_per_s, tier.node_stash_gigabytes_per_s),
            updated,
        )
