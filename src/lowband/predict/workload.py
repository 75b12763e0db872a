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
from lowband.spec.mesh import Levels, Mesh
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
        """Raises UserError if degrees do not divide evenly, or if the levels cannot serve the scheme."""
        for name in ("ranks", "tp", "pp", "interleave", "micro_batch", "seq_len", "accumulation"):
            if np.min(getattr(self, name)) < 1:
                raise UserError(f"{name} {getattr(self, name)}", allowed="1 or more")
        if self.ranks % (self.tp * self.pp):
            raise UserError(
                f"{self.ranks} ranks cannot be divided over tp {self.tp} x pp {self.pp}",
                allowed=f"multiples of {self.tp * self.pp}",
            )
        if self.model.layers % (self.pp * self.interleave):
            raise UserError(
                f"{self.model.layers} layers cannot be divided over pp {self.pp} x interleave "
                f"{self.interleave}",
                where=f"model '{self.model.name}'",
            )
        if self.model.heads % self.tp:
            raise UserError(
                f"{self.model.heads} heads cannot be divided over tp {self.tp}",
                where=f"model '{self.model.name}'",
            )
        self.scheme.check(self.levels)

    @property
    def dp(self) -> int:
        """Data-parallel ranks, over which the scheme is placed."""
        return self.ranks // (self.tp * self.pp)

    @cached_property
    def mesh(self) -> Mesh:
        """Ranks by axis, tensor-parallel first."""
        try:
            return Mesh.fit(self.machine.sizes, {"tp": self.tp, "dp": self.dp, "pp": self.pp})
        except UserError as error:
            raise UserError(
                error.what, where=f"machine '{self.machine.name}'", allowed=error.allowed
            ) from None

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


def workload_of(spec: RunSpec) -> Workload:
    """A run of our engine on its machine at full scale; the stack that the machine names is not used."""
    return Workload(
        spec.machine, OURS, spec.model, spec.scheme, spec.ranks, spec.micro_batch, spec.seq_len,
        spec.accumulation, recompute=spec.recompute,
        schedule="breadth-first" if spec.order == "breadth" else "1f1b", compute_dtype=spec.compute_dtype,
        reduce_dtype=spec.reduce_dtype, collectives=spec.collectives,
    )  # fmt: skip
