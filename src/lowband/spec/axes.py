"""The axes of parallelism of one job: how many ranks lie along each, and how they work together."""

from typing import Any, Final, Literal

from pydantic import PositiveInt, SerializerFunctionWrapHandler, model_serializer

from lowband.errors import UserError
from lowband.spec.step import Schedule
from lowband.spec.yaml_model import Strict

AxisName = Literal["tensor", "data", "pipeline"]

# What options and columns call these; Axes.of_options reads them.
SHORT: Final = {"tensor": "tp", "pipeline": "pp", "data": "dp", "chunks": "interleave"}


class Axes(Strict):
    """Degrees of the axes beside data, which has the ranks that are left.

    From the inside: tensor, whose ranks exchange most, then data, then pipeline.

    chunks:            stages per rank of a pipeline (virtual stages)
    schedule:          of a step's micro-batches
    sequence_parallel: whether ranks along tensor also divide what lies outside of their exchanges
    """

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1
    chunks: PositiveInt = 1
    schedule: Schedule = "1f1b"
    sequence_parallel: bool = False

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without what is as if there were a data axis alone, so that checksums stay."""
        values: dict[str, Any] = handler(self)
        return {key: value for key, value in values.items() if value != getattr(ONLY_DATA, key)}

    @classmethod
    def of_options(cls, tp: int = 1, pp: int = 1, interleave: int = 1, schedule: Schedule = "1f1b") -> "Axes":
        """By the names of options, with sequence parallelism wherever there is a tensor axis."""
        return cls(tensor=tp, pipeline=pp, chunks=interleave, schedule=schedule, sequence_parallel=tp > 1)

    def degrees(self, ranks: int) -> dict[str, int]:
        """Ranks along every axis of a job, inner to outer. Raises UserError if they are no whole number."""
        others = self.tensor * self.pipeline
        if ranks % others:
            what = f"{ranks} ranks are no multiple of tensor {self.tensor} x pipeline {self.pipeline}"
            raise UserError(what, where="axes", allowed=f"multiples of {others} ranks")
        return {"tensor": self.tensor, "data": ranks // others, "pipeline": self.pipeline}

    @property
    def outside(self) -> int:
        """Ranks that divide what lies outside of tensor parallelism's exchanges: norms, residuals."""
        return self.tensor if self.sequence_parallel else 1


ONLY_DATA: Final = Axes()
