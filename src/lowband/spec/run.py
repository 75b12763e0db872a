"""The complete specification of one training run: nothing downstream reads the configuration again."""

import hashlib
import json
from typing import Any, Literal

from pydantic import Field, PositiveInt, model_validator

from lowband.errors import UserError
from lowband.spec.axes import AXES, check_parts
from lowband.spec.context import Layout, check_context, check_layout, layout_of
from lowband.spec.machine import Machine, TierName
from lowband.spec.mesh import Levels, Mesh
from lowband.spec.model import ModelSpec
from lowband.spec.peers import TORCH_SCHEDULES, TORCH_WRONG, peer_arguments
from lowband.spec.run_options import RunOptions
from lowband.spec.schedule import Lists
from lowband.spec.schedules import check_numbers, lists
from lowband.spec.scheme import Scheme
from lowband.spec.stages import blocks_of, first_blocks
from lowband.spec.tiers import DEVICE, DISK, HOST


class RunSpec(RunOptions):
    """`results/<cluster>/runs/<run_id>/spec.json`."""

    run_id: str = Field(description="readable and unique; a name, never parsed")
    suite: str
    repeat: PositiveInt = Field(description="from 1; repeats of a point have seeds seed, seed + 1, ...")
    condition: str = Field(default="", description="values of the suite's other axes, for titles")
    scaling: Literal["weak", "strong"] = Field(
        default="weak",
        description="what the suite keeps constant as ranks vary: weak: micro_batch; strong: global_batch",
    )
    machine: Machine
    model: ModelSpec
    scheme: Scheme
    micro_batch: PositiveInt = Field(
        description="sequences per rank and backward pass; ranks along context have the same ones"
    )

    @property
    def lists(self) -> Lists:
        """The actions of a step, by place along pipeline."""
        return lists(self.schedule, self.pipeline, self.accumulation, self.chunks_each)

    @model_validator(mode="after")
    def _fits(self) -> "RunSpec":
        if not self.model.is_gpt:
            raise ValueError(
                f"model '{self.model.name}' can be predicted, not trained: it is not a plain GPT"
            )
        if self.seq_len > self.model.seq_len:
            raise ValueError(
                f"seq_len ({self.seq_len}) is longer than the model's longest ({self.model.seq_len})"
            )
        if self.attention == "flash2" and self.model.linear_layers == self.model.layers:
            raise ValueError(f"attention flash2 is of softmax, and model '{self.model.name}' has none")
        if self.attention == "flash2" and self.device == "fake":
            raise ValueError("attention flash2 cannot run on fake tensors; sdpa counts the same bytes")
        if self.warmup_steps >= self.steps:
            raise ValueError(
                f"warmup_steps ({self.warmup_steps}) leave none of the {self.steps} steps to measure"
            )
        only_ours = (
            self.device == "fake",
            self.checkpoint_every > 0,
            not self.overlap,
            self.collectives != "hops",
            self.order == "breadth",
            self.has_other_axes and self.engine != "fsdp2",
            self.context > 1,
            self.model.experts is not None,
        )
        if self.engine != "lowband" and any(only_ours):
            raise ValueError(
                f"engine {self.engine} supports neither device fake nor checkpoints here, its overlap cannot "
                "be turned off, its collectives are its own, it accumulates depth-first, its models have no "
                "experts, and its only axis is data (of fsdp2 also tensor and pipeline)"
            )
        if DISK in self.scheme.tiers and (self.device == "fake" or self.is_in_stages):
            raise ValueError("states on a disk: neither on device fake nor in stages of a pipeline")
        parted = self.scheme.parted
        if parted and (self.device == "fake" or self.is_in_stages or self.model.experts is not None):
            raise ValueError(
                f"scheme '{self.scheme.name}': {parted} neither on device fake, nor in stages of a pipeline, "
                "nor with experts"
            )
        if self.steps % self.scheme.period:
            raise ValueError(
                f"steps ({self.steps}) are no multiple of {self.scheme.period}, the period of scheme "
                f"'{self.scheme.name}': replicas would not agree on the last steps"
            )
        if self.scheme.sync is not None and self.scheme.sync.delay and self.steps == self.scheme.period:
            raise ValueError(
                f"steps ({self.steps}) are one period of scheme '{self.scheme.name}', whose last exchange "
                f"arrives in the next one (allowed: multiples of {self.scheme.period} "
                f"from {2 * self.scheme.period})"
            )
        box = self.machine.box
        if box is not None and self.ranks > box.nodes * self.machine.node_size:
            raise ValueError(f"the box of {self.machine.name} has {box.nodes * self.machine.node_size} ranks")
        try:
            _ = self.job_levels  # raises for ranks that do not fill groups
            self._check_pipeline()
            self.check(self.model)
            self._check_tensor()
            self.scheme.check(self.levels)
            check_context(self, self.scheme, self.levels)
            self._check_context()
            self._check_experts()
            self._check_step()
            self._check_tiers()
        except UserError as error:
            raise ValueError(str(error)) from None
        return self

    def _check_pipeline(self) -> None:
        where = f"pipeline {self.pipeline}"
        if not self.is_in_stages:
            if self.schedule != "1f1b" or self.chunks:
                what = f"schedule {self.schedule}, chunks {self.chunks}"
                raise UserError(what, where=where, allowed="pipeline 2 or more, or neither")
            return
        if self.device == "fake":
            what = "device fake plays one rank for all, and stages differ"
            raise UserError(what, where=where, allowed="pipeline 1")
        check_numbers(self.schedule, self.pipeline, self.accumulation, self.chunks_each)
        if self.order != "depth" or self.collectives != "hops":
            raise UserError(
                f"order {self.order}, collectives {self.collectives}", where=where,
                allowed="order depth (see schedule) and collectives hops",
            )  # fmt: skip
        if self.scheme.sync is not None:
            what = f"scheme '{self.scheme.name}': replicas that meet seldom have no stages"
            raise UserError(what, where=where, allowed="schemes without sync")

    def _check_tensor(self) -> None:
        if self.model.vocab % self.tensor:
            what = f"{self.model.vocab} rows of the vocabulary cannot be divided over tensor {self.tensor}"
            raise UserError(what, where=f"model '{self.model.name}'")
        if self.sequence_parallel and self.tensor > 1 and self.device == "fake":
            raise UserError(
                "sequence_parallel: ranks' shards have different numbers of shared parameters, and one rank "
                "is counted for all",
                where="device fake",
            )
        if self.sequence_parallel and self.seq_len % self.tensor:
            what = f"{self.seq_len} tokens cannot be divided over tensor {self.tensor}"
            raise UserError(what, where="sequence_parallel")

    def _check_context(self) -> None:
        layout = self.layout
        check_layout(layout, self, self.model, self.seq_len)
        if self.device == "fake" and len(layout.levels.hops(*layout.span("ring"))) > 1:
            what = (
                "in a ring over several levels, next ranks lie on different ones, and one is counted for all"
            )
            raise UserError(what, where="device fake", allowed="ring on one level")
        if self.device == "fake" and layout.travels == "pass":
            what = "the last rank passes no state on, and one is counted for all"
            raise UserError(what, where="device fake", allowed="context_states gather, scan")
        if self.sequence_parallel and self.seq_len // self.context % self.tensor:
            what = f"{self.seq_len // self.context} tokens of a context rank cannot be divided over tensor"
            raise UserError(what, where="sequence_parallel", allowed=f"multiples of {self.tensor}")

    def _check_experts(self) -> None:
        self.check_experts(self.model, self.scheme)
        if self.expert == 1:
            return
        check_parts(self.route_parts, self.scheme, self.levels_alike.world)
        if self.device == "fake":
            what = "tokens choose their experts, and one rank is counted for all"
            raise UserError(what, where=f"device fake, expert {self.expert}", allowed="expert 1")
        self.scheme.check(self.levels_alike)

    def _check_step(self) -> None:
        self.check_step()
        if self.compile and self.model.experts is not None:
            raise UserError(
                "each token chooses its experts", where="compile", allowed="models without experts"
            )
        if self.fused_adamw and (self.scheme.sync is not None or self.scheme.optim_tier != DEVICE):
            what = f"scheme '{self.scheme.name}': replicas that meet seldom, or states off the device"
            raise UserError(what, where="fused_adamw", allowed="schemes without both")
        if self.recompute == "host" and (
            self.compile or self.model.experts is not None or self.model.linear_layers
        ):
            raise UserError(
                "bytes that compiled blocks, experts or linear layers keep are not known",
                where="recompute host",
                allowed="softmax layers that are not compiled",
            )
        if self.recompute_layers:
            self._check_recomputed()
        if self.loss_chunks > self.micro_batch * self.seq_len:
            tokens = self.micro_batch * self.seq_len
            raise UserError(
                f"{self.loss_chunks} pieces",
                where="loss_chunks",
                allowed=f"at most {tokens}, the tokens of a pass",
            )

    def _check_recomputed(self) -> None:
        where = f"recompute_layers {self.recompute_layers}"
        if self.recompute == "none":
            raise UserError("recompute none", where=where, allowed="recompute full or host")
        if self.context * self.expert > 1:
            what = f"context {self.context}, expert {self.expert}"
            raise UserError(what, where=where, allowed="neither of both axes")
        if 0 < self.model.linear_layers < self.model.layers:
            raise UserError("blocks of two kinds", where=where, allowed="0: all of them")
        try:
            _ = self.recomputed
        except UserError as error:
            raise UserError(error.what, where=where, allowed=error.allowed) from None

    @property
    def recomputed(self) -> tuple[int, ...]:
        """The blocks, by number, that `recompute` is about."""
        if self.recompute == "none":
            return ()
        return first_blocks(blocks_of(self.model, self.stages, self.layers), self.recompute_layers)

    def _check_tiers(self) -> None:
        """A machine that states its links' rates states those of the tiers that are used; what is on a disk
        passes through the host."""
        if all(level.link is not None for level in self.machine.levels):
            keeps: tuple[TierName, ...] = (HOST,) if self.recompute == "host" else ()
            for tier in (*self.scheme.tiers, *keeps):
                self.machine.tier(tier)

    @property
    def layout(self) -> Layout:
        """Which tokens of a sequence are whose, along context."""
        return layout_of(self.machine.sizes, self, self.ranks)

    @property
    def point(self) -> dict[str, Any]:
        """The run without its repeat: the value of each of OPTIONS, with the seed of the first repeat.

        Of the machine: its hardware.
        """
        options = self.model_dump(mode="json", include=set(OPTIONS) - {"machine"})
        first_seed = self.seed - self.repeat + 1
        return {**options, "machine": self.machine.hardware, "seed": first_seed}

    @property
    def training_sum(self) -> str:
        """Of all that a run's rows depend on: its point and its seed, without limits and checkpoints."""
        seen = set(OPTIONS) - UNSEEN - {"machine"}
        stated = self.model_dump(
            mode="json", include=seen, exclude_defaults=True
        )  # so later options change none
        stated["model"].pop("source", None)
        stated["scheme"].pop("known_as", None)
        content = json.dumps({**stated, "machine": self.machine.hardware, "seed": self.seed}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    def check_engine(self) -> None:
        """Raises UserError, with the reason, if the engine cannot do this run or has no counterpart."""
        if self.engine == "lowband":
            return
        peer_arguments(self.engine, self.scheme, self.levels)
        if self.engine in ("ddp", "powersgd") and self.compute_dtype != "fp32":
            raise UserError("no counterpart: it keeps no fp32 master weights", where="bf16 under DDP")
        if self.has_other_axes:
            self._check_torchs_axes()

    def _check_torchs_axes(self) -> None:
        where = f"tensor {self.tensor}, pipeline {self.pipeline} under FSDP2"
        if self.model.tied_head:
            raise UserError("no counterpart: a tied head is not cut", where=where, allowed="tied_head false")
        if self.sequence_parallel:
            what = "no counterpart: sequence parallelism is not set up"
            raise UserError(what, where=where, allowed="sequence_parallel false")
        if self.is_in_stages and self.schedule not in TORCH_SCHEDULES:
            what = f"no counterpart: torch has no schedule {self.schedule}"
            if self.schedule in TORCH_WRONG:
                what = f"no counterpart: torch's {self.schedule} under FSDP2 loses gradients"
            raise UserError(what, where=where, allowed=TORCH_SCHEDULES)

    @property
    def levels(self) -> Levels:
        """The machine's levels, as the ranks along the data axis see them: schemes are placed on these."""
        return self.mesh.levels("data")

    @property
    def mesh(self) -> Mesh:
        return Mesh.fit(self.machine.sizes, self.degrees(self.ranks))

    @property
    def levels_alike(self) -> Levels:
        """The same, as those that have the same experts see them."""
        return Mesh.fit(self.machine.sizes, self.with_experts(self.ranks)).levels("alike")

    @property
    def levels_of_experts(self) -> Levels:
        """And as those that have different ones do."""
        return Mesh.fit(self.machine.sizes, self.with_experts(self.ranks)).levels("expert")

    @property
    def job_levels(self) -> Levels:
        """The machine's levels, fitted to all ranks."""
        return Levels.fit(self.machine.sizes, self.ranks)

    @property
    def global_batch(self) -> int:
        """Sequences per optimizer step over all ranks."""
        return self.micro_batch * self.accumulation * self.levels.world // self.context

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.seq_len


# Options that change neither results nor times.
UNSEEN = frozenset({"time_limit_s", "peer_timeout_s", "checkpoint_every"})
# Every key by which two runs may differ, axes last; the others only name a run.
OPTIONS = tuple(
    key
    for key in sorted(RunSpec.model_fields, key=(*AXES, *RunSpec.younger).__contains__)
    if key not in ("run_id", "repeat", "condition")
)
