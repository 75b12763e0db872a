"""The axes of parallelism of one job: how many ranks lie along each."""

from math import prod
from typing import Literal

from pydantic import PositiveInt

from lowband.errors import UserError
from lowband.spec.yaml_model import Strict

AxisName = Literal["tensor", "data", "pipeline"]


class Axes(Strict):
    """Degrees of the axes beside data, which has the ranks that are left.

    From the inside: tensor, whose ranks exchange most, then data, then pipeline.
    """

    tensor: PositiveInt = 1
    pipeline: PositiveInt = 1

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
