"""The input of a prediction as it is given: model, scheme, machine and stack, with the numbers that a user
varies, and what follows from these at once."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from lowband.cost.bytes import stage_numels
from lowband.cost.experts import groups_of
from lowband.cost.lora import Lora
from lowband.cost.memory import largest_two
from lowband.cost.numbers import Num
from lowband.cost.popular import with_copies
from lowband.cost.stages import gathers
from lowband.cost.tiers import Beyond
from lowband.errors import UserError
from lowband.spec.axes import ONLY_DATA, Ways
from lowband.spec.context import Layout, layout_of
from lowband.spec.machine import Machine, TierName
from lowband.spec.mesh import MOST_RANKS, Levels, Mesh
from lowband.spec.model import ModelSpec
from lowband.spec.partition import UnitLayout
from lowband.spec.schedules import check_numbers
from lowband.spec.scheme import Scheme
from lowband.spec.stack import Stack
from lowband.spec.step import Order, Pattern, Recompute, passes
from lowband.spec.tiers import DEVICE, HOST


@dataclass(frozen=True)
class Given:
    """One point, or a grid: micro_batch, seq_len, accumulation and `faster` may be arrays that broadcast.

    The scheme is placed over the ranks along the data axis. The stack says how attention computes, and in
    which dtype gradients are reduced.

    micro_batch:  sequences per data-parallel group and pass, of whose tokens ranks along context have equal
                  parts, seq_len / context; accumulation: passes per optimizer step, which
                  are a pipeline's micro-batches
    recomputed:   share of the layers that `recompute` is about; the others keep everything
    faster:       level -> factor on its link's rate
    collectives:  of our engine; None: those of the stack
    imbalance:    of ranks with different experts, rows of the fullest one's as a multiple of the mean
    loss_chunks, fused_adamw: as a run's
    beyond:       the device, where states lie there beside those that the scheme places there; None: none
    lora:         adapters, beside which all else is frozen; None: all is trained
    """

    machine: Machine
    stack: Stack
    model: ModelSpec
    scheme: Scheme
    ranks: int
    micro_batch: Num
    seq_len: Num
    accumulation: Num = 1
    recompute: Recompute = "full"
    recomputed: float = 1.0
    axes: Ways = ONLY_DATA
    compute_dtype: str = "bf16"
    faster: Mapping[str, Num] = field(default_factory=dict)
    collectives: Pattern | None = None
    imbalance: float = 1.0
    loss_chunks: int = 1
    fused_adamw: bool = False
    beyond: Beyond | None = None
    lora: Lora | None = None

    @property
    def can_keep_on_host(self) -> bool:
        """Whether a run could keep activations there (RunOptions.check_step)."""
        axes, model = self.axes, self.model
        return (
            axes.tensor * axes.context * axes.stages * axes.expert == 1
            and model.experts is None
            and not model.linear_layers
            and self.lora is None
        )

    @property
    def tiers(self) -> list[TierName]:
        """Those that states or activations lie in or pass, the host's memory first."""
        if self.placed is not None:
            return self.placed.tiers
        return [HOST] if self.recompute == "host" else []

    @property
    def placed(self) -> Beyond | None:
        """The states beyond the device, by the scheme and by `beyond`; None: all are on it."""
        is_given = not self._of_scheme and (self.beyond is None or self.beyond.offload is None)
        return self.beyond if is_given else self._of_both

    @cached_property
    def _of_scheme(self) -> tuple[TierName, ...]:
        return self.scheme.tiers

    @cached_property
    def _of_both(self) -> Beyond:
        given, of_scheme = self.beyond or Beyond(), self.scheme
        optim, weights = (None if t == DEVICE else t for t in (of_scheme.optim_tier, of_scheme.weights_tier))
        placed = replace(given, optim=given.optim or optim, weights=given.weights or weights)
        if (offload := of_scheme.offload or given.offload) is None:
            return placed
        numels = stage_numels(self.model, self.levels, self.axes)  # the parts are of whole units
        places = list(zip(offload.of_units(numels), numels, strict=True))
        staying = [numel for where, numel in places if where == "beyond"]
        coming = [numel for where, numel in places if where == "to and fro"]
        moved = sum(coming)
        there = sum(staying) + moved
        return replace(
            placed, share=there / sum(numels), stride=there / moved if moved else 0,
            staying=max(staying, default=0), coming=largest_two(coming),
        )  # fmt: skip

    @property
    def is_late(self) -> bool:
        """Whether the host's update is a step late."""
        return self.scheme.is_late or (self.beyond is not None and self.beyond.is_late)

    @cached_property
    def adapters(self) -> tuple[int, ...]:
        """As `Place.numels`, elements of the adapters alone."""
        if self.lora is None:
            return ()
        block = UnitLayout.of(self.lora.shapes(self.model), self.levels.world).numel
        return (0, *[block] * self.model.layers)

    @cached_property
    def mesh(self) -> Mesh:
        """Ranks by axis."""
        return mesh_of(self.machine, self.model, self.ranks, self.axes)

    @cached_property
    def levels(self) -> Levels:
        """Levels of the ranks along the data axis, over which the scheme is placed."""
        return self.mesh.levels("data")

    @cached_property
    def levels_alike(self) -> Levels:
        """The same of those that have the same experts, over which theirs is."""
        return self._by_experts.levels("alike")

    @cached_property
    def levels_of_experts(self) -> Levels:
        """And of those that have different ones."""
        return self._by_experts.levels("expert")

    @cached_property
    def _by_experts(self) -> Mesh:
        return Mesh.fit(self.machine.sizes, self.axes.with_experts(self.ranks))

    @property
    def load(self) -> float:
        """Of experts: rows of the fullest rank's as a multiple of the mean; of one rank all."""
        return self._behind_copies[0]

    @property
    def crossing(self) -> Fraction:
        """The part of tokens that copies of popular experts leave to other groups of ranks."""
        return Fraction(self._behind_copies[1])

    @cached_property
    def _behind_copies(self) -> tuple[float, float]:
        axes, model = self.axes, self.model
        load = min(self.imbalance, axes.expert)
        if not axes.copies or model.experts is None:
            return load, 1.0
        groups = groups_of(self.levels_of_experts, axes.route)
        return with_copies(model.experts, model.top_k, axes.expert, groups, axes.copies, load)

    @cached_property
    def layout(self) -> Layout:
        """Which tokens of a sequence are whose, along context."""
        return layout_of(self.machine.sizes, self.axes, self.ranks)

    @property
    def own_tokens(self) -> Num:
        """Tokens of a sequence that are a rank's."""
        return self.seq_len // self.axes.context

    @property
    def again(self) -> float:
        """Share of the layers whose whole forward runs again."""
        return self.recomputed if self.recompute == "full" else 0.0

    @property
    def order(self) -> Order:
        """The order in which a rank's units compute a step's micro-batches."""
        return "breadth" if self.axes.schedule == "breadth-first" else "depth"

    @property
    def is_in_stages(self) -> bool:
        return self.axes.pipeline > 1

    @property
    def hides_sends(self) -> bool:
        """Whether messages between its stages travel beside the computation."""
        return self.stack.hidden_sends in ("all", self.axes.row)

    @property
    def passes(self) -> Num:
        """How often a step reduces each unit. In stages gradients are summed over the micro-batches first."""
        return 1 if self.is_in_stages else passes(self.accumulation, self.order)

    @property
    def gathers(self) -> tuple[Num, Num]:
        """How often a step gathers each unit, for forwards and for backwards."""
        if not self.is_in_stages:
            return self.passes, self.passes
        return gathers(self.axes.row, self.axes.pipeline, self.accumulation, self.axes.chunks)

    @property
    def keeps_grads(self) -> Any:
        """Whether gradients are in memory while further micro-batches compute, or in a buffer of all."""
        several = np.asarray(self.accumulation if self.is_in_stages else self.passes) > 1
        return several | self.stack.has_buffer

    @property
    def sums_grads(self) -> Any:
        """Whether there is memory for sums over micro-batches, of one of them, too."""
        return (np.asarray(self.accumulation) > 1) | self.stack.has_buffer

    @property
    def tokens(self) -> Num:
        """Tokens per optimizer step, over all ranks."""
        return self.micro_batch * self.seq_len * self.accumulation * (self.levels.world // self.axes.context)


def mesh_of(machine: Machine, model: ModelSpec, ranks: int, axes: Ways) -> Mesh:
    """Ranks by axis. Raises UserError if they are too many, or if they, the model or the machine cannot be
    divided so."""
    if ranks > MOST_RANKS:
        raise UserError(
            f"{ranks:,} ranks", allowed=f"at most {MOST_RANKS:,}: the largest jobs known have a tenth of that"
        )
    degrees = axes.degrees(ranks)
    axes.check(model)
    axes.check_experts(model)
    check_numbers(axes.row, axes.pipeline, 1, axes.chunks)
    try:
        return Mesh.fit(machine.sizes, degrees)
    except UserError as error:
        raise UserError(error.what, where=f"machine '{machine.name}'", allowed=error.allowed) from None
