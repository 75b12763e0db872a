"""The input of a prediction: model, scheme, machine and stack, with the numbers that a user varies."""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from lowband.cost.activations import Recompute
from lowband.cost.bytes import stage_numels
from lowband.cost.experts import groups_of
from lowband.cost.lora import Lora
from lowband.cost.numbers import Num
from lowband.cost.popular import with_copies
from lowband.cost.stages import gathers
from lowband.cost.tiers import Beyond
from lowband.errors import UserError
from lowband.spec.axes import ONLY_DATA, Axes, Ways, check_parts
from lowband.spec.context import Layout, check_context, check_layout, layout_of
from lowband.spec.machine import Machine, TierName
from lowband.spec.mesh import MOST_RANKS, Levels, Mesh
from lowband.spec.model import ModelSpec
from lowband.spec.partition import UnitLayout
from lowband.spec.run import RunSpec
from lowband.spec.schedules import check_numbers
from lowband.spec.scheme import Scheme
from lowband.spec.sourced import Fact
from lowband.spec.stack import OURS, Stack
from lowband.spec.step import Order, Pattern, Schedule, passes
from lowband.spec.tiers import DEVICE, HOST


@dataclass(frozen=True)
class Workload:
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

    def __post_init__(self) -> None:
        """Raises UserError for impossible degrees or sizes, if the levels cannot serve the scheme, and for
        stages of which some have more layers of softmax."""
        for name in ("ranks", "micro_batch", "seq_len", "accumulation"):
            if np.min(getattr(self, name)) < 1:
                raise UserError(f"{name} {getattr(self, name)}", allowed="1 or more")
        if not self.imbalance >= 1:
            raise UserError(f"imbalance {self.imbalance}", allowed="1 or more")
        if not 0 <= self.recomputed <= 1 or (
            self.recomputed < 1 and self.axes.context * self.axes.expert > 1
        ):
            what = f"{self.recomputed * self.model.layers:g} layers that are recomputed"
            allowed = f"1 to {self.model.layers}; with ranks along context or experts all"
            raise UserError(what, where=f"model '{self.model.name}'", allowed=allowed)
        for tier in self.beyond.tiers if self.beyond else ():
            self.machine.tier(tier)
        if self.stack.optimizer != "adamw" and self.placed is not None:
            raise UserError(
                f"states of {self.stack.optimizer} beyond the device are not predicted", allowed="adamw"
            )
        self._check_offload()
        self._check_stages()
        self._check_adapters()
        self._check_kept()
        levels = self.levels
        for length in {int(each) for each in np.ravel(self.seq_len)} if self.axes.context > 1 else ():
            check_layout(self.layout, self.axes, self.model, length)
        try:
            self.scheme.check(levels)
            check_context(self.axes, self.scheme, levels)
            self.axes.check_experts(self.model, self.scheme)
            check_parts(self.axes.route_parts, self.scheme, self.levels_alike.world)
            self.scheme.check(self.levels_alike)
        except UserError as error:
            where = f"{error.where} on machine '{self.machine.name}'"
            raise UserError(error.what, where=where, allowed=error.allowed) from None

    def _check_offload(self) -> None:
        given = self.beyond.offload if self.beyond else None
        if self.scheme.offload is None and given is None:
            return
        where = f"scheme '{self.scheme.name}'"
        if self.scheme.offload is not None and self.beyond is not None and self.beyond.optim is not None:
            raise UserError("offload beside --tiers optim", where=where, allowed="one of them")
        if self.axes.stages > 1 or self.axes.expert > 1:
            what = "offload in stages of a pipeline or with ranks along experts is not predicted"
            raise UserError(what, where=where, allowed="no offload")

    def _check_stages(self) -> None:
        if self.model.dense_layers and self.axes.is_uneven:
            what = "uneven stages of a model of which some layers have no experts are not predicted"
            raise UserError(what, where=f"model '{self.model.name}'", allowed="stages of equally many layers")
        every = self.model.softmax_every
        if every is None or self.axes.stages == 1:
            return
        if any(count % every for count in self.axes.blocks(self.model)):
            what = f"stages in which not every {every}-th layer is one of softmax are not predicted"
            allowed = f"stages of multiples of {every} layers"
            raise UserError(what, where=f"model '{self.model.name}'", allowed=allowed)

    def _check_adapters(self) -> None:
        if self.lora is None:
            return
        self.lora.check(self.model)
        axes = self.axes
        for what, is_there in (
            ("ranks along tensor, context, pipeline or experts",
             axes.tensor * axes.context * axes.stages * axes.expert > 1),
            ("states beyond the device", self.placed is not None),
            ("replicas that meet seldom", self.scheme.sync is not None),
            ("recomputation by operator", self.recompute == "op"),
            (f"{self.stack.products} products", self.stack.products != "bf16"),
            (self.stack.optimizer, self.stack.optimizer != "adamw"),
        ):  # fmt: skip
            if is_there:
                raise UserError(f"adapters with {what} are not predicted")

    def _check_kept(self) -> None:
        if self.recompute != "host":
            return
        self.machine.tier(HOST)
        if not self.can_keep_on_host:
            what = "activations on the host with other axes than data, experts, linear layers or adapters"
            raise UserError(f"{what} are not predicted")

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

    @cached_property
    def placed(self) -> Beyond | None:
        """The states beyond the device, by the scheme and by `beyond`; None: all are on it."""
        if not self.scheme.tiers and (self.beyond is None or self.beyond.offload is None):
            return self.beyond
        given, of_scheme = self.beyond or Beyond(), self.scheme
        optim, weights = (None if t == DEVICE else t for t in (of_scheme.optim_tier, of_scheme.weights_tier))
        placed = replace(given, optim=given.optim or optim, weights=given.weights or weights)
        if (offload := of_scheme.offload or given.offload) is None:
            return placed
        numels = stage_numels(self.model, self.levels, self.axes)  # the parts are of whole units
        places = list(zip(offload.of_units(numels), numels, strict=True))
        there = sum(numel for where, numel in places if where != "device")
        moved = sum(numel for where, numel in places if where == "to and fro")
        return replace(placed, share=there / sum(numels), stride=there / moved if moved else 0)

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
        """Whether gradients are in memory while further micro-batches compute."""
        return np.asarray(self.accumulation if self.is_in_stages else self.passes) > 1

    def points(self) -> tuple[tuple[int, ...], list["Workload"]]:
        """The shape of the grid, () of one point, and its points."""
        names = ("micro_batch", "seq_len", "accumulation")
        values = np.broadcast_arrays(*(getattr(self, name) for name in names), *self.faster.values())
        found = []
        for one in zip(*(np.ravel(each).tolist() for each in values), strict=True):
            faster = dict(zip(self.faster, one[len(names) :], strict=True))
            found.append(self.varied(**dict(zip(names, one, strict=False)), faster=faster))
        return values[0].shape, found

    def varied(self, **changes: Any) -> "Workload":
        """`replace`, unchecked, by what is as possible. What has been worked out stays, so that neither the
        axes' degrees nor tiers may change."""
        made = copy(self)
        vars(made).update(changes)
        return made

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


# What a run calls its schedule or its order, by the predictor's names.
_IN_USE: dict[str, Schedule] = {
    "depth": "1f1b", "breadth": "breadth-first", "gpipe": "breadth-first", "interleaved": "1f1b",
}  # fmt: skip


def workload_of(spec: RunSpec) -> Workload:
    """A run of our engine on its machine at full scale; the stack that the machine names is not used."""
    none = Fact(value=0, source="the run's spec")
    stack = OURS.model_copy(
        update={"reduce_dtype": spec.reduce_dtype} | ({} if spec.overlap else {"overlap": none})
    )
    named: Any = spec.schedule if spec.is_in_stages else spec.order
    return Workload(
        spec.machine, stack, spec.model, spec.scheme, spec.ranks, spec.micro_batch, spec.seq_len,
        spec.accumulation, recompute=spec.recompute,
        axes=Ways(
            **Axes.of(spec).model_dump(), chunks=spec.chunks_each if spec.is_in_stages else 1,
            schedule=_IN_USE.get(named, named), layers=spec.layers,
        ),
        compute_dtype=spec.compute_dtype, collectives=spec.collectives,
        loss_chunks=spec.loss_chunks, fused_adamw=spec.fused_adamw,
    )  # fmt: skip
