"""A number that a machine file states: its value, its interval and its source."""

from typing import Annotated, Literal, TypeVar

from pydantic import Field, NonNegativeFloat, model_validator

from lowband.spec.yaml_model import Strict

T = TypeVar("T")
Bound = Literal["low", "value", "high"]
Place = Literal["inside", "on a bound", "outside"]
Kind = Literal["fitted", "measured or published", "assumed", "default"]
NEAR = 0.01  # of the range between the bounds
DEFAULT = "default"  # the first word of a source; those of an assumption:
ASSUMED = ("assumed", "that of")


# What a rate, a size or a factor may be: beyond any machine, and yet its products and quotients are floats.
LEAST, MOST = 1e-9, 1e15
Magnitude = Annotated[float, Field(ge=LEAST, le=MOST)]


class Bounds(Strict):
    """What physics allows a fitted constant to be: a fit that ends elsewhere shows a wrong model."""

    low: NonNegativeFloat
    high: NonNegativeFloat
    source: str = Field(min_length=1, description="where both ends come from")

    @model_validator(mode="after")
    def _ordered(self) -> "Bounds":
        if not self.low < self.high:
            raise ValueError(f"low < high does not hold: {self.low}, {self.high}")
        return self

    def place(self, value: float) -> Place:
        """Where a value lies; within 1 % of the range it lies on a bound."""
        if not self.low <= value <= self.high:
            return "outside"
        near = NEAR * (self.high - self.low)
        return "inside" if self.low + near < value < self.high - near else "on a bound"


class Fact(Strict):
    """A constant with its source. A fitted one names the published rows it was fitted on, and has bounds."""

    value: Annotated[float, Field(ge=0, le=MOST)]
    low: Annotated[float, Field(ge=0, le=MOST)] | None = Field(
        default=None, description="lower end of its interval; none: exact"
    )
    high: Annotated[float, Field(ge=0, le=MOST)] | None = Field(
        default=None, description="upper end of its interval; none: exact"
    )
    source: str = Field(min_length=1, description="where the number comes from, or how it was fitted")
    calibrated_on: tuple[str, ...] = Field(
        default=(), description="ids of the rows it was fitted on; (): measured or stated elsewhere"
    )

    bounds: Bounds | None = Field(default=None, description="of a fitted constant; none: it was not fitted")

    @model_validator(mode="after")
    def _ordered(self) -> "Fact":
        if bool(self.calibrated_on) != (self.bounds is not None):
            raise ValueError("a constant has bounds if it was fitted (calibrated_on), and only then")
        low = self.value if self.low is None else self.low
        high = self.value if self.high is None else self.high
        if not low <= self.value <= high:
            raise ValueError(f"low <= value <= high does not hold: {low}, {self.value}, {high}")
        return self

    @property
    def fitted_on(self) -> list[str]:
        """The sources of the rows that it was fitted on: their ids begin with them."""
        return list(dict.fromkeys(row.partition(":")[0].partition(" ")[0] for row in self.calibrated_on))

    @property
    def kind(self) -> Kind:
        """What the number is, by its source; `default` if a prediction needed it and no file stated it."""
        if self.calibrated_on:
            return "fitted"
        if self.source.startswith(DEFAULT):
            return "default"
        return "assumed" if self.source.startswith(ASSUMED) else "measured or published"

    @property
    def place(self) -> Place | None:
        """Where a fitted constant lies in its bounds; None: it was not fitted."""
        return None if self.bounds is None else self.bounds.place(self.value)

    def at(self, bound: Bound) -> float:
        """The value, or one end of its interval."""
        end: float | None = getattr(self, bound)
        return self.value if end is None else end


def divides(found: T) -> T:
    """A validator of constants by which something is divided: rates, shares that are reached, factors."""
    for fact in found.values() if isinstance(found, dict) else [found]:
        if isinstance(fact, Fact) and fact.at("low") < LEAST:
            raise ValueError(f"{fact.at('low'):g} is less than {LEAST:g}: nothing could be divided by it")
    return found


def facts_of(place: str, part: Strict) -> dict[str, Fact]:
    """The constants among the fields of `part`, by `<place>.<key>`."""
    values = {f"{place}.{key}": getattr(part, key) for key in type(part).model_fields}
    return {key: value for key, value in values.items() if isinstance(value, Fact)}
