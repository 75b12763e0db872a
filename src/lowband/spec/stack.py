"""A software stack as data: what it computes and keeps, how its collectives run, overlap, fixed times."""

from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, field_validator

from lowband.spec.axes import Ways
from lowband.spec.sourced import Fact, divides, facts_of
from lowband.spec.step import Attention, Operations, Optimizer, Pattern, Products, ReduceDtype
from lowband.spec.wire import DTYPE_BYTES
from lowband.spec.yaml_model import Strict

ANY = "any"  # in place of a level's name


class StackConstants(Strict):
    """How a stack computes and what its runs have shown. A constant that is left out costs nothing."""

    overlap: Fact | None = Field(
        default=None,
        description="share of the hideable communication that is hidden behind computation; none: all",
    )
    tensor_overlap: Fact | None = Field(
        default=None,
        description="the same of tensor parallelism's collectives, behind the products of their block; "
        "none: nothing is hidden",
    )
    collective_us: Fact | None = Field(default=None, description="fixed time of one collective; none: 0")
    unit_us: Fact | None = Field(
        default=None,
        description="time of one unit's pass in which the device waits for the host (synchronising hooks), "
        "where gradients are sharded; none: 0",
    )
    launch_us: Fact | None = Field(
        default=None,
        description="time in which the host launches one unit's pass; it hides behind the device's "
        "computation where that takes longer; none: 0",
    )
    gathers: Fact | None = Field(
        default=None, description="collectives into which the gather of a block's weights is cut; none: 1"
    )
    reductions: Fact | None = Field(
        default=None, description="the same of the reduction of its gradients; none: 1"
    )
    reused: Fact | None = Field(
        default=None,
        description="elements: weights that are used again before so many others were stay gathered; none: "
        "0, each block is gathered again for its backward",
    )
    logit_bytes: Fact | None = Field(
        default=None,
        description="memory per logit at the loss; none: 14 bytes, of a loss that is not compiled",
    )
    gated_kept: Literal[2, 3, 4] = Field(
        default=4,
        description="vectors of a gated MLP's width that are kept for the backward: 4, each operation's; 3 "
        "where the activation function is computed again (Megatron-LM's bias_swiglu_fusion); 2 where its "
        "product with the gate is, too (xformers' SwiGLU)",
    )
    summed_dtype: Literal["fp32", "bf16", "reduced"] = Field(
        default="fp32",
        description="in which gradients are kept and summed over micro-batches; reduced: that in which they "
        "are reduced, as they are in one buffer, which is there with one micro-batch, too (Megatron-LM)",
    )
    gathered_inputs: Fact | None = Field(
        default=None,
        description="how many of the 2 inputs of a block that sequence parallelism gathers are kept for "
        "the backward; none: 0, it gathers them again",
    )
    error_factor: Fact | None = Field(
        default=None,
        description="80 % of the published runs took between the predicted time over this factor and times "
        "it, each predicted by constants fitted without it; none: no such runs on this machine",
    )
    attention: Attention = "flash"
    dropout: bool = Field(default=False, description="of attention's scores and of a block's two outputs")
    sequence_parallel: bool = Field(
        default=True, description="ranks along tensor divide the tokens between their products, too"
    )
    products: Products = Field(
        default="bf16",
        description="dtype of a block's matrix products; attention's and the head's have 16 bits",
    )
    operations: Operations = Field(
        default="fused",
        description="a norm, and a rotary embedding, is one kernel, as in compiled blocks; norms: a norm "
        "alone is; single: neither, as where torch runs operation by operation",
    )
    keeps_casts: bool = Field(
        default=False,
        description="weights in 8 bits are kept for a step's other micro-batches (Transformer Engine), not "
        "cast for each pass; of weights that are gathered, until these are freed",
    )
    optimizer: Optimizer = Field(default="adamw", description="whose moments are kept beside fp32 masters")
    reduce_dtype: ReduceDtype = Field(default="bf16", description="in which gradients are reduced")
    hidden_sends: Literal["none", "interleaved", "all"] = Field(
        default="none",
        description="schedules of a pipeline in which a rank computes on while its messages to other stages "
        "travel; elsewhere it waits for each",
    )
    hidden_updates: bool = Field(
        default=False, description="updates of states on a disk end behind the next forward, not in the step"
    )
    efficiency: dict[str, Fact] = Field(
        default={},
        description="level -> share of the link's achieved rate that the sharding's collectives achieve; "
        "`any` stands for every level that is not named; none: all of it",
    )

    _divide = field_validator("gathers", "reductions", "error_factor", "efficiency")(divides)


class Stack(StackConstants):
    """A file of `config/stacks/`. Its own constants hold everywhere, except where `at` states others."""

    name: str
    description: str
    collectives: Pattern = Field(
        default="hops",
        description="hops: one per level; flat: one ring over all ranks; joined: one exchange of all",
    )
    at: dict[str, StackConstants] = Field(
        default={}, description="cluster -> constants that were measured or fitted there"
    )

    def on(self, clusters: Sequence[str]) -> "Stack":
        """The stack with its constants on a cluster. clusters: that cluster, then those it is like."""
        for cluster in clusters:
            if cluster in self.at:
                there = self.at[cluster]
                stated = {key: getattr(there, key) for key in there.model_fields_set}
                return self.model_copy(update={**stated, "at": {}})
        return self.model_copy(update={"at": {}})

    def with_options(self, told: Mapping[str, object]) -> "Stack":
        """The stack with other values of its keys; None: its own."""
        return self.model_copy(update={key: value for key, value in told.items() if value is not None})

    @property
    def summed_bytes(self) -> int:
        """Of a gradient that is kept and summed over micro-batches."""
        dtype = self.reduce_dtype if self.summed_dtype == "reduced" else self.summed_dtype
        return DTYPE_BYTES[dtype]

    @property
    def has_buffer(self) -> bool:
        """Whether gradients have one buffer, which is there in every step."""
        return self.summed_dtype == "reduced"

    def axes(self, axes: Ways) -> Ways:
        """Axes as the stack has them."""
        return axes.model_copy(update={"sequence_parallel": self.sequence_parallel and axes.tensor > 1})

    @property
    def has_evidence(self) -> bool:
        """Whether runs of it on this machine are known: constants were fitted to them, or errors counted."""
        return self.error_factor is not None or any(fact.calibrated_on for fact in self.facts.values())

    @property
    def facts(self) -> dict[str, Fact]:
        """Every constant with a source, by its path: stack.<key>, stack.efficiency.<level>."""
        by_level = {f"stack.efficiency.{level}": fact for level, fact in self.efficiency.items()}
        return facts_of("stack", self) | by_level


# Our engine. It has no file: predicting a run takes nothing but the run's spec, whose option `collectives`
# decides between hops and flat rings. None of its constants was fitted.
OURS = Stack(
    name="ours", description="our engine: a hop per level, a lane per level, all overlap", hidden_sends="all",
    hidden_updates=True,
)  # fmt: skip
