"""The axes of parallelism of one job: how many ranks lie along each."""

from math import prod
from typing import Any, Literal

from pydantic import Field, PositiveInt, SerializerFunctionWrapHandler, model_serializer

from lowband.errors import UserError
from lowband.spec.yaml_model import Strict

AxisName = Literal["tensor", "data", "pipeline"]


class Axes(Strict):
    """Degrees of the axes beside data, which has the ranks that are left.

    From the inside: tensor, whose ranks exchange most, then data, then pipeline.
    """

    tensor: PositiveInt = Field(default=1, description="ranks along the tensor axis, the innermost")
    pipeline: PositiveInt = Field(default=1, description="ranks along the pipeline axis, the outermost")

    @model_serializer(mode="wrap")
    def _without_defaults(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without axes of one rank, so that the checksums of what has none of them stay."""
        values: dict[str, Any] = handler(self)
        return {key: value for key, value in values.items() if key not in AXES or value != AXES[key].default}

    @property
    def has_other_axes(self) -> bool:
        """Whether some ranks of the job do not lie along the data axis of this one."""
        return self.tensor * self.pipeline > 1

    def degrees(self, ranks: int) -> dict[AxisName, int]:
        """Ranks along every axis of a job, inner to outer. Raises UserError if they are no whole number."""
        others = prod((self.tensor, self.pipeline))
        if ranks % others:
            raise UserError(
                f"{ranks} ranks are no multiple of tensor {self.tensor} x pipeline {self.pipeline}",
                where="axes",
                allowed=f"multiples of {others} ranks",
            )
        return {"tensor": self.tensor, "data": ranks // others, "pipeline": self.pipeline}


AXES = Axes.model_fields
