"""A number that a machine file states: its value, its interval and its source."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, model_validator

from lowband.spec.yaml_model import Strict

Bound = Literal["low", "value", "high"]


class Fact(Strict):
    """A constant with its source. A fitted one names the published rows it was fitted on."""

    value: NonNegativeFloat
    low: NonNegativeFloat | None = Field(default=None, description="lower end of its interval; none: exact")
    high: NonNegativeFloat | None = Field(default=None, description="upper end of its interval; none: exact")
    source: str = Field(min_length=1, description="where the number comes from, or how it was fitted")
    calibrated_on: tuple[str, ...] = Field(
        default=(), description="ids of the rows it was fitted on; (): measured or stated elsewhere"
    )

    @model_validator(mode="after")
    def _ordered(self) -> "Fact":
        low = self.value if self.low is None else self.low
        high = self.value if self.high is None else self.high
        if not low <= self.value <= high:
            raise ValueError(f"low <= value <= high does not hold: {low}, {self.value}, {high}")
        return self

    def at(self, bound: Bound) -> float:
        """The value, or one end of its interval."""
        end = getattr(self, bound)
        return self.value if end is None else float(end)


def facts_of(place: str, part: Strict) -> dict[str, Fact]:
    """The constants among the fields of `part`, by `<place>.<key>`."""
    values = {f"{place}.{key}": getattr(part, key) for key in type(part).model_fields}
    return {key: value for key, value in values.items() if isinstance(value, Fact)}
