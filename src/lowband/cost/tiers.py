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

from lowband.cost.memory import GRAD_BYTES, STATE_BYTES
from lowband.cost.numbers import GIGA, Num
from lowband.errors import UserError
from lowband.spec.machine import Tier, TierName
from lowband.spec.offload import Offload
from lowband.spec.sourced import Bound, Fact

State = Literal["weights", "optimizer", "activations"]
STATES: tuple[State, ...] = ("weights", "optimizer", "activations")

UPDATE_BYTES = 2 * STATE_BYTES + GRAD_BYTES  # read and written by an update


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
    offload: in place of both, by whole units, as in a scheme; or that the host's update is late
    staying, coming: elements of the largest unit that the host updates, and of the largest two that come to
             the device one behind the other; None: units are not known

    Of several ways at once, share, stride, staying and coming are arrays.
    """

    optim: TierName | None = None
    weights: TierName | None = None
    share: Num = 1.0
    stride: Num = 0
    offload: Offload | None = None
    staying: Num | None = None
    coming: Num | None = None

    def __post_init__(self) -> None:
        share, stride = np.asarray(self.share), np.asarray(self.stride)
        if not ((share > 0) & (share <= 1)).all():
            raise UserError(f"share {self.share}", allowed="more than 0, at most 1")
        if ((stride < 0) | ((stride > 0) & (stride < 1))).any():
            raise UserError(f"stride {self.stride}", allowed="0, or 1 or more")
        if self.offload is None:
            return
        if self.optim is None or self.weights is not None:
            what = "weights beyond the device" if self.weights else "no optim beyond the device"
            raise UserError(f"offload beside {what}", allowed="--tiers optim@host")
        if self.optim == "disk" and self.offload.late:
            what = "late: states on a disk are updated when their gradients are there"
            raise UserError(what, allowed="--tiers optim@host")

    @staticmethod
    def of(
        places: Sequence[str], share: float | None = None, stride: int | None = None, late: bool = False
    ) -> "Beyond | None":
        """Of words such as `optim@host`; None of none. Raises UserError for another state or tier.

        share, stride: None: all of the states, updated by the host
        """
        found: dict[str, Any] = {}
        for word in places:
            state, _, tier = word.partition("@")
            if state not in ("optim", "weights") or tier not in get_args(TierName):
                allowed = "optim@host, optim@disk, weights@host, weights@disk"
                raise UserError(f"no place '{word}'", where="--tiers", allowed=allowed)
            if found.get(state, tier) != tier:
                what = f"{state} in two tiers: {found[state]} and {tier}"
                raise UserError(what, where="--tiers", allowed="one of each state")
            found[state] = tier
        parts = share is not None or stride is not None
        if "optim" not in found and (parts or late):
            options = "--tier-share and --tier-stride are" if parts else "--tier-late is"
            raise UserError(f"{options} of --tiers", allowed="--tiers optim@host")
        if late and parts:
            what = "--tier-late is of all states, updated by the host"
            raise UserError(what, allowed="--tier-late without --tier-share and --tier-stride")
        if not found:
            return None
        places_of = found.get("optim"), found.get("weights"), 1.0 if share is None else share, stride or 0
        return Beyond(*places_of, Offload(late=True) if late else None)

    @property
    def moved(self) -> Num:
        """Of the parameters, those whose states lie there and come to the device for their update."""
        return _every(self.share, self.stride)

    @property
    def places(self) -> dict[str, TierName]:
        """By state, its tier."""
        found = {"optim": self.optim, "weights": self.weights}
        return {state: tier for state, tier in found.items() if tier is not None}

    @property
    def parts(self) -> dict[str, Any]:
        """What a scheme's `offload` says of them; nothing of all states, updated by the host, in the step."""
        given = self.offload or self
        said = {"share": given.share if given.share < 1 else None, "stride": given.stride or None}
        return {key: value for key, value in {**said, "late": self.is_late or None}.items() if value}

    @property
    def is_late(self) -> bool:
        """Whether the host's update is."""
        return self.offload is not None and self.offload.late

    @property
    def tiers(self) -> list[TierName]:
        """Those that something lies in or passes, the host's memory first."""
        used = {tier for tier in (self.optim, self.weights) if tier is not None}
        return [tier for tier in get_args(TierName) if tier in used or (tier == "host" and used)]


def _every(share: Num, stride: Num) -> Num:
    """Of a share, each stride-th; nothing with stride 0."""
    if np.ndim(stride) == 0:
        return share / stride if stride else 0.0
    return np.where(stride > 0, share / np.maximum(stride, 1), 0.0)


def update_s(parameters: Num, rates: Rates, stride: Num = 0) -> Num:
    """Seconds in which a rank's parameters beyond the device are updated; rates: of the host's memory."""
    on_device = _every(1.0, stride)
    memory = (UPDATE_BYTES * (1 - on_device) + 2 * STATE_BYTES * on_device) / rates.update
    way = STATE_BYTES * on_device / np.minimum(rates.fetch, rates.stash)
    return parameters * np.maximum(memory, way) / GIGA


def best_stride(rates: Rates) -> int:
    """The stride with the shortest update, 0 or 2 to 10; the longer one of equals."""
    strides = [0, *range(10, 1, -1)]
    times = {stride: float(update_s(1.0, rates, stride)) for stride in strides}
    best: int = min(times, key=times.__getitem__)
    return best
