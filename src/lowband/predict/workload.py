"""The input of a prediction: model, scheme, machine and stack, with the numbers that a user varies."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from lowband.cost.activations import Attention, Recompute
from lowband.cost.numbers import Num
from lowband.errors import UserError
from lowband.spec.machine import Machine
from lowband.spec.mesh import MOST_RANKS, Levels, Mesh
from lowband.spec.model import ModelSpec
from lowband.spec.run import RunSpec
from lowband.spec.scheme import Scheme
from lowband.spec.stack import OURS, Stack
from lowband.spec.step import Order, Pattern, passes

Schedule = Literal["1f1b", "breadth-first"]


@dataclass(frozen=True)
class Workload:
    """One point, or a grid: micro_batch, seq_len, accumulation and `faster` may be arrays that broadcast.

    Ranks are numbered tensor-parallel first, then data-parallel, then by pipeline stage. The scheme is placed
    over the data-parallel ranks.

    micro_batch:  sequences per data-parallel group and pass; accumulation: passes per optimizer step, which
                  are a pipeline's micro-batches
    interleave:   stages per rank of a pipeline (virtual stages)
    faster:       level -> factor on its link's rate
    collectives:  of our engine; None: those of the stack
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
    attention: Attention = "flash"
    dropout: bool = False
    tp: int = 1
    pp: int = 1
    interleave: int = 1
    schedule: Schedule = "1f1b"
    sequence_parallel: bool = False
    compute_dtype: str = "bf16"
    reduce_dtype: str = "bf16"
    faster: Mapping[str, Num] = field(default_factory=dict)
    collectives: Pattern | None = None

    def __post_init__(self) -> None:
        """Raises UserError for impossible degrees or sizes, or if the levels cannot serve the scheme."""
        for name in ("ranks", "tp", "pp", "interleave", "micro_batch", "seq_len", "accumulation"):
            if np.min(getattr(self, name)) < 1:
                raise UserError(f"{name} {getattr(self, name)}", allowed="1 or more")
        check_degrees(self.model, self.ranks, self.tp, self.pp, self.interleave)
        try:
            self.scheme.check(self.levels)
        except UserError as error:
            where = f"{error.where} on machine '{self.machine.name}'"
            raise UserError(error.what, where=where, allowed=error.allowed) from None

    @property
    def dp(self) -> int:
        """Data-parallel ranks, over which the scheme is placed."""
        return self.ranks // (self.tp * self.pp)

    @cached_property
    def mesh(self) -> Mesh:
        """Ranks by axis, tensor-parallel first."""
        return mesh_of(self.machine, self.ranks, self.tp, self.pp)

    @cached_property
    def levels(self) -> Levels:
        """Levels of the data-parallel ranks."""
        return self.mesh.levels("dp")

    @property
    def order(self) -> Order:
        """The order in which a rank's units compute a step's micro-batches."""
        return "breadth" if self.schedule == "breadth-first" else "depth"

    @property
    def passes(self) -> Num:
        """How often a step gathers and reduces each unit."""
        return passes(self.accumulation, self.order)

    @property
    def tokens(self) -> Num:
        """Tokens per optimizer step, over all ranks."""
        return self.micro_batch * self.seq_len * self.accumulation * self.dp


def check_degrees(model: ModelSpec, ranks: int, tp: int, pp: int, interleave: int = 1) -> None:
    """Raises UserError, with the reason, if ranks or model cannot be divided so; for too many ranks too."""
    if ranks > MOST_RANKS:
        raise UserError(
            f"{ranks:,} ranks", allowed=f"at most {MOST_RANKS:,}: the largest jobs known have a tenth of that"
        )
    if ranks % (tp * pp):
        raise UserError(
            f"{ranks} ranks cannot be divided over tp {tp} x pp {pp}", allowed=f"multiples of {tp * pp}"
        )
    if model.layers % (pp * interleave):
        raise UserError(
            f"{model.layers} layers cannot be divided over pp {pp} x interleave {interleave}",
            where=f"model '{model.name}'",
        )
    if model.heads % tp:
        raise UserError(f"{model.heads} heads cannot be divided over tp {tp}", where=f"model '{model.name}'")


def mesh_of(machine: Machine, ranks: int, tp: int, pp: int) -> Mesh:
    """Ranks by axis, tensor-parallel first. Raises UserError for degrees that do not fill whole groups."""
    try:
        return Mesh.fit(machine.sizes, {"tp": tp, "dp": ranks // (tp * pp), "pp": pp})
    except UserError as error:
        raise UserError(error.what, where=f"machine '{machine.name}'", allowed=error.allowed) from None


def workload_of(spec: RunSpec) -> Workload:
    """A run of our engine on its machine at full scale; the stack that the machine names is not used."""
    return Workload(
        spec.machine, OURS, spec.model, spec.scheme, spec.ranks, spec.micro_batch, spec.seq_len,
        spec.accumulation, recompute=spec.recompute,
        schedule="breadth-first" if spec.order == "breadth" else "1f1b", compute_dtype=spec.compute_dtype,
        reduce_dtype=spec.reduce_dtype, collectives=spec.collectives,
    )  # fmt: skip
