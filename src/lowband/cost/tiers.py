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

Adam's update reads weights, gradients and both moments, and writes all but gradients: 28 bytes a parameter
in fp32, at the rate U of the host's memory that its cores reach. Of the share r of parameters whose states
lie beyond the device (Twin-Flow) every k-th subgroup may be updated on the device (Deep Optimizer States,
arXiv 2410.21316), for which 12 bytes come and 12 go through the same memory; its gradients and new weights
stay there. Of n parameters of a rank

    r n max((28 (1 - 1/k) + 24 / k) / U, 12 / (k F))

seconds, at F bytes a second of the slower way. As 24 is less than 28, the shortest stride that the way keeps
up with is the best one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from lowband.cost.memory import ADAM_MOMENT_BYTES, GRAD_BYTES, MASTER_BYTES
from lowband.cost.numbers import Num
from lowband.errors import UserError
from lowband.spec.machine import Tier, TierName
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


@dataclass(frozen=True)
class Beyond:
    """Which states lie beyond the device, and in which tier.

    optim:   master weights and moments, with the gradients of their update; the update runs on the host
    weights: the copy used for compute
    share:   of the parameters, those whose optimizer states lie there
    stride:  every how-many-th of their subgroups is updated on the device, in the mean; 0: none
    """

    optim: TierName | None = None
    weights: TierName | None = None
    share: float = 1.0
    stride: float = 0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise UserError(f"share {self.share}", allowed="more than 0, at most 1")
        if self.stride < 0 or 0 < self.stride < 1:
            raise UserError(f"stride {self.stride}", allowed="0, or 1 or more")

    @staticmethod
    def of(places: Sequence[str], share: float = 1.0, stride: int = 0) -> "Beyond | None":
        """Of words such as `optim@host`; None of none. Raises UserError for another state or tier."""
        found: dict[str, Any] = {}
        for word in places:
            state, _, tier = word.partition("@")
            if state not in ("optim", "weights") or tier not in get_args(TierName):
                allowed = "optim@host, optim@disk, weights@host, weights@disk"
                raise UserError(f"no place '{word}'", where="--tiers", allowed=allowed)
            found[state] = tier
        if "optim" not in found and (share, stride) != (1.0, 0):
            raise UserError("--tier-share and --tier-stride are of --tiers", allowed="--tiers optim@host")
        if not found:
            return None
        return Beyond(found.get("optim"), found.get("weights"), share, stride)

    @property
    def moved(self) -> float:
        """Of the parameters, those whose states lie there and come to the device for their update."""
        return self.share / self.stride if self.stride else 0.0

    @property
    def tiers(self) -> list[TierName]:
        """Those that something lies in or passes, the host's memory first."""
        used = {tier for tier in (self.optim, self.weights) if tier is not None}
        return [tier for tier in get_args(TierName) if tier in used or (tier == "host" and used)]


def update_s(parameters: Num, rates: Rates, stride: float = 0) -> Num:
    """Seconds in which a rank's parameters beyond the device are updated; rates: of the host's memory."""
    on_device = 1 / stride if stride else 0.0
    memory = (UPDATE_BYTES * (1 - on_device) + 2 * MOVED_BYTES * on_device) / rates.update
    way = MOVED_BYTES * on_device / np.minimum(rates.fetch, rates.stash)
    return parameters * np.maximum(memory, way) / GIGA


def best_stride(rates: Rates, most: int = 10) -> int:
    """The stride with the shortest update, 0 or 2 to `most`; the longer one of equals."""
    strides = [0, *range(most, 1, -1)]
    times = {stride: float(update_s(1.0, rates, stride)) for stride in strides}
    best: int = min(times, key=times.__getitem__)
    return best
