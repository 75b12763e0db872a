"""Which units' optimizer states lie beyond the device, and which of those are updated on it.

A part of the states may stay on the device (Twin-Flow of ZeRO-Offload++), and of those beyond it some may
come to the device for their update, so that the host's cores have less to do (Deep Optimizer States, arXiv
2410.21316). Whole units do: the last ones of the module, whose gradients are ready first, to leave the device
behind the rest of the backward, and whose weights the next forward needs last.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field, NonNegativeInt, model_validator

from lowband.spec.yaml_model import Younger

# Of a unit's states: on the device; beyond it, updated by the host; beyond it, updated on the device.
Where = Literal["device", "beyond", "to and fro"]


class Offload(Younger):
    """`offload` of a scheme whose optimizer's states lie in another tier than the device."""

    younger: ClassVar = ("share", "stride", "late")

    share: float = Field(default=1.0, gt=0, le=1, description="of the parameters, those with states there")
    stride: NonNegativeInt = Field(
        default=0, description="every how-many-th unit of those is updated on the device; 0: none"
    )
    late: bool = Field(default=False, description="a step's update runs behind the next forward and backward")

    @model_validator(mode="after")
    def _says_something(self) -> "Offload":
        is_whole = (self.share, self.stride) == (1.0, 0)
        if is_whole and not self.late:
            raise ValueError("all states lie there without it (allowed: share below 1, stride above 0, late)")
        if self.late and not is_whole:
            raise ValueError(
                "late is of all states, updated by the host (allowed: late without share, stride)"
            )
        return self

    def of_units(self, numels: Sequence[int]) -> list[Where]:
        """By unit. numels: elements of each, the root's first

        The fewest units, from the last one backwards, that have the share; of these, counted so, every
        stride-th is updated on the device.
        """
        found: list[Where] = ["device"] * len(numels)
        left, total, count = self.share * sum(numels), 0, 0
        for place in reversed(range(len(numels))):
            if total >= left:
                break
            total, count = total + numels[place], count + 1
            found[place] = "to and fro" if self.stride and count % self.stride == 0 else "beyond"
        return found
