"""The axes of parallelism of one job: how many ranks lie along each, and how they work together."""

from abc import abstractmethod
from collections.abc import Collection, Sequence
from itertools import product
from typing import ClassVar, Final, Literal, get_args

from pydantic import Field, NonNegativeInt, PositiveInt

from lowband.errors import UserError
from lowband.spec.mesh import SELF
from lowband.spec.model import ModelSpec
from lowband.spec.schedules import SCHEDULES, Name
from lowband.spec.scheme import Scheme
from lowband.spec.stages import blocks_of
from lowband.spec.step import Route, Schedule, StatesOption
from lowband.spec.yaml_model import Younger

# expert: ranks that have different experts; alike: those that have the same ones.
AxisName = Literal["tensor", "context", "expert", "alike", "data", "pipeline"]

# What the predictor's options and columns call these; Ways.of_options reads them.
SHORT: Final = {"tensor": "tp", "pipeline": "pp", "data": "dp", "chunks": "interleave"}

# The same with the axes of context and of experts, where ranks may lie along them.
SHORT_ALL: Final = SHORT | {
    "context": "cp", "context_attention": "ways", "context_states": "states", "expert": "ep",
}  # fmt: skip


class Axes(Younger):
    """Degrees of the axes beside data, which has the ranks that are left, and how their ranks work together.

    From the inside: tensor, whose ranks exchange most, then data, then pipeline. Context divides the data
    axis: of its ranks, which all hold the same parameters, `context` neighbours have parts of the same
    sequences. So schemes, which are placed on the data axis, need not know of it. Expert divides it once
    more, whatever context does: `expert` neighbours have different experts, whose scheme is placed on the
    ranks that are left, which have the same ones.
    """

    tensor: PositiveInt = Field(default=1, description="ranks along the tensor axis, the innermost")
    context: PositiveInt = Field(
        default=1, description="neighbours along the data axis that divide the tokens of their sequences"
    )
    context_attention: str = Field(
        default="ring",
        description="how they attend: gather, ring, heads; or by level: package=heads,world=ring; state of "
        "linear layers",
    )
    context_states: StatesOption = Field(
        default="auto",
        description="how linear layers' states travel; auto: by scan if context_attention is state",
    )
    zigzag: bool = Field(
        default=True, description="each of them has an early and a late part: causal attention is balanced"
    )
    expert: PositiveInt = Field(
        default=1, description="neighbours along the data axis that divide the experts of a layer"
    )
    route: Route = Field(
        default="merged",
        description="how tokens travel to experts: flat; level by level: hops; once to each group: merged",
    )
    route_parts: PositiveInt = Field(
        default=1,
        description="parts of a rank's tokens that take turns: while one is on its way to experts or back, "
        "another is computed",
    )
    copies: NonNegativeInt = Field(
        default=0,
        description="of a layer's experts, the most loaded ones so far that every group of ranks has, whose "
        "tokens then need not cross the outermost level",
    )
    pipeline: PositiveInt = Field(default=1, description="ranks along the pipeline axis, the outermost")
    sequence_parallel: bool = Field(
        default=False, description="ranks along tensor divide the tokens between their products, too"
    )

    @classmethod
    def left_out(cls) -> Collection[str]:
        return (*AXES, *cls.younger)

    @classmethod
    def of(cls, options: "Axes") -> "Axes":
        """The axes alone of a run's options."""
        return Axes(**{key: getattr(options, key) for key in AXES})

    @property
    def beside(self) -> str:
        """The degrees of the axes beside data, as `tensor2.pipeline4`; "" without."""
        degrees = {name: getattr(self, name) for name in ("tensor", "context", "expert", "pipeline")}
        return ".".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1)

    @property
    def has_other_axes(self) -> bool:
        """Whether some ranks of the job do not lie along the data axis of this one."""
        return self.tensor * self.pipeline > 1

    @property
    def has_both_ends(self) -> bool:
        """Whether the first rank along pipeline has the last stage, too."""
        return self.pipeline == 1

    def degrees(self, ranks: int) -> dict[AxisName, int]:
        """Ranks along every axis of a job, inner to outer, with context's in data.

        Raises UserError if they are no whole number.
        """
        others = self.tensor * self.pipeline
        if ranks % others:
            what = f"{ranks} ranks are no multiple of tensor {self.tensor} x pipeline {self.pipeline}"
            raise UserError(what, where="axes", allowed=f"multiples of {others} ranks")
        data = ranks // others
        if data % self.context:
            what = f"{data} ranks along data are no multiple of context {self.context}"
            raise UserError(what, where="axes", allowed=f"multiples of {others * self.context} ranks")
        if data % self.expert:
            what = f"{data} ranks along data are no multiple of expert {self.expert}"
            raise UserError(what, where="axes", allowed=f"multiples of {others * self.expert} ranks")
        return {"tensor": self.tensor, "data": data, "pipeline": self.pipeline}

    def with_context(self, ranks: int) -> dict[AxisName, int]:
        """The same with context apart: along data, ranks that have different sequences."""
        of = self.degrees(ranks)
        data = of["data"] // self.context
        return {"tensor": of["tensor"], "context": self.context, "data": data, "pipeline": of["pipeline"]}

    def check_experts(self, model: ModelSpec, scheme: Scheme | None = None) -> None:
        """Raises UserError if ranks cannot divide the model's experts, or not under the scheme."""
        where, experts = f"expert {self.expert}", model.experts
        if self.copies > (experts or 0) or (self.copies and self.expert == 1):
            what = f"copies {self.copies} of {experts or 'no'} experts of model '{model.name}'"
            raise UserError(what, where=where, allowed="0; with expert 2 or more at most all experts")
        self.check_route_parts()
        if experts is not None and scheme is not None and scheme.sync is not None:
            what = f"scheme '{scheme.name}': replicas that meet seldom would sum experts' load at every step"
            raise UserError(what, where=f"model '{model.name}'", allowed="schemes without sync")
        if self.expert == 1:
            return
        if experts is None or experts % self.expert:
            what = f"{experts or 'no'} experts of model '{model.name}' cannot be divided"
            raise UserError(
                what, where=where, allowed="expert 1, or a model whose experts are a multiple of it"
            )

    def check_route_parts(self) -> None:
        """Raises UserError where nothing travels in parts, or copies of experts would with each."""
        if self.route_parts > 1 and (self.copies or self.expert == 1):
            beside = f"copies {self.copies}" if self.copies else "expert 1"
            what = f"route_parts {self.route_parts} beside {beside}"
            allowed = "1; with expert 2 or more and copies 0 any number"
            raise UserError(what, where="experts", allowed=allowed)

    def with_experts(self, ranks: int) -> dict[AxisName, int]:
        """The same by experts: ranks along data with different ones, and with the same ones."""
        of = self.degrees(ranks)
        alike = of["data"] // self.expert
        return {"tensor": of["tensor"], "expert": self.expert, "alike": alike, "pipeline": of["pipeline"]}


AXES: Final = Axes.model_fields


def check_parts(parts: int, scheme: Scheme, alike: int) -> None:
    """Raises UserError where each part of a rank's tokens would gather the experts anew.

    parts: Axes.route_parts; alike: ranks with the same experts
    """
    if parts > 1 and alike > 1 and scheme.weights != SELF:
        what = f"route_parts {parts} under scheme '{scheme.name}', whose weights each part would gather"
        raise UserError(
            what, where="experts", allowed=f"1, weights: {SELF}, or expert = the ranks along data"
        )


class InStages(Axes):
    """Axes, and which of a model's blocks each stage along pipeline has."""

    younger: ClassVar[tuple[str, ...]] = ("layers",)

    layers: tuple[PositiveInt, ...] = Field(
        default=(), description="blocks of each stage along pipeline, from first to last; none: equally many"
    )

    @property
    @abstractmethod
    def stages(self) -> int:
        """Parts of a model, one after the other, on all ranks along pipeline."""

    @property
    def is_uneven(self) -> bool:
        """Whether some stages have more blocks than others."""
        return len(set(self.layers)) > 1

    def blocks(self, model: ModelSpec) -> tuple[int, ...]:
        """By stage, its blocks. Raises UserError as `spec.stages.blocks_of` does."""
        if self.layers and self.pipeline == 1:
            what = f"layers {list(self.layers)} with pipeline 1"
            raise UserError(what, where=f"model '{model.name}'", allowed="pipeline 2 or more, or no layers")
        return blocks_of(model, self.stages, self.layers)

    def check(self, model: ModelSpec) -> None:
        """Raises UserError if the model cannot be divided so."""
        self.blocks(model)
        if model.heads % self.tensor:
            what = f"{model.heads} heads cannot be divided over tensor {self.tensor}"
            raise UserError(what, where=f"model '{model.name}'")
        if model.kv_heads is not None and model.kv_heads % self.tensor:
            what = f"{model.kv_heads} heads of keys cannot be divided over tensor {self.tensor}"
            raise UserError(what, where=f"model '{model.name}'")


def to_experts(
    degrees: Sequence[int], routes: Sequence[Route], copies: Sequence[int] = (0,)
) -> list[tuple[int, Route, int]]:
    """Each degree in each of the routes with as many copies; one rank has neither."""
    several = [*product(routes, copies)]
    return [(ep, *way) for ep in degrees for way in (several if ep > 1 else [(get_args(Route)[-1], 0)])]


def shown(value: object) -> object:
    """A run's option as names and tables have it: of layers, 3+2+2+1."""
    return "+".join(map(str, value)) if isinstance(value, list | tuple) else value


# What options call each row of spec.schedules, where they say the chunks apart. depth: of a run on one stage
SCHEDULE_OF: Final[dict[Name, Schedule]] = {
    "depth": "1f1b", "1f1b": "1f1b", "interleaved": "1f1b",
    "breadth": "breadth-first", "gpipe": "breadth-first",
    "zb-h1": "zb-h1", "zb-h2": "zb-h2", "zb-v": "zb-v", "dualpipe-v": "dualpipe-v",
}  # fmt: skip


def row_of(schedule: Schedule, chunks: int) -> Name:
    """The other way. chunks: stages per rank of a pipeline"""
    if schedule == "1f1b":
        return "1f1b" if chunks == 1 else "interleaved"
    return "breadth" if schedule == "breadth-first" else schedule


class Ways(InStages):
    """Axes, and how their ranks work together, as the predictor knows them.

    chunks:            stages per rank of a pipeline (virtual stages)
    schedule:          of a step's micro-batches
    """

    chunks: PositiveInt = 1
    schedule: Schedule = "1f1b"

    @classmethod
    def of_options(
        cls,
        tp: int = 1,
        pp: int = 1,
        interleave: int = 1,
        schedule: Schedule = "1f1b",
        layers: Sequence[int] = (),
        cp: int = 1,
        ep: int = 1,
        route: Route = "merged",
        copies: int = 0,
    ) -> "Ways":
        """By the names of options, with sequence parallelism wherever there is a tensor axis."""
        return cls(
            tensor=tp, context=cp, expert=ep, route=route, copies=copies, pipeline=pp, chunks=interleave,
            schedule=schedule, sequence_parallel=tp > 1, layers=tuple(layers),
        )  # fmt: skip

    @property
    def stages(self) -> int:
        return self.pipeline * self.chunks

    @property
    def row(self) -> Name:
        """The schedule's row in spec.schedules."""
        return row_of(self.schedule, self.chunks)

    @property
    def has_both_ends(self) -> bool:
        return self.pipeline == 1 or SCHEDULES[self.row].in_a_vee

    @property
    def attends(self) -> str:
        """How ranks along context attend, in words."""
        if self.context_states == "auto":
            return self.context_attention
        beside = "" if self.context_attention == "state" else f"{self.context_attention}, "
        return f"{beside}state by {self.context_states}"

    @property
    def outside(self) -> int:
        """Ranks that divide what lies outside of tensor parallelism's exchanges: norms, residuals."""
        return self.tensor if self.sequence_parallel else 1


ONLY_DATA: Final = Ways()
