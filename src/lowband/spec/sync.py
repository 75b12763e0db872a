"""How replicas that do not average gradients exchange their weights: every so many optimizer steps."""

from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from lowband.spec.yaml_model import Strict

Outer = Literal["average", "momentum", "nesterov"]


class Sync(Strict):
    """`sync` of a scheme. A replica is a group of ranks that average their gradients in every step.

    Every H steps replicas exchange how far their weights have moved from the anchor, the weights that they
    agreed on last. The mean, d, is the gradient of an outer optimizer, whose result is the new anchor and the
    new weights of all replicas:

        average    anchor -= d                               Local SGD (Stich, arXiv 1805.09767)
        momentum   v = momentum v + d                        SlowMo (arXiv 1910.00643)
                   anchor -= learning_rate v
        nesterov   v = momentum v + d                        DiLoCo (arXiv 2311.08105)
                   anchor -= learning_rate (d + momentum v)

    `average` keeps no v. A scheme without `sync` averages gradients over all ranks in every step.
    """

    beyond: str = Field(description="level of a replica; replicas are the groups of that level")
    every: PositiveInt = Field(description="H, optimizer steps from one exchange to the next")
    outer: Outer = Field(default="average", description="the outer optimizer")
    learning_rate: PositiveFloat = Field(default=1.0, description="of the outer optimizer")
    momentum: float = Field(default=0.0, ge=0, lt=1, description="of the outer optimizer")

    @model_validator(mode="after")
    def _fits(self) -> "Sync":
        if self.outer == "average" and (self.learning_rate != 1 or self.momentum != 0):
            raise ValueError(
                "outer average has neither learning_rate nor momentum (allowed: outer momentum or nesterov)"
            )
        if self.outer != "average" and self.momentum == 0:
            raise ValueError(f"outer {self.outer} has a momentum above 0 (allowed: outer average without)")
        return self

    @property
    def has_momentum(self) -> bool:
        """Whether the outer optimizer keeps a state."""
        return self.outer != "average"
