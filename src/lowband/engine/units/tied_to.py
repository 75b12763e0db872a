"""A parameter that stages on several ranks of a pipeline share: attribute `tied_to` of the parameter."""

from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class TiedTo:
    """What this rank's copy is one of. Each rank has it in a unit of its own, so that all have equal shards.

    name:   in the whole model, its first one
    places: along the pipeline, of the ranks that have copies, in the order of the model
    place:  this rank's
    """

    name: str
    places: tuple[int, ...]
    place: int

    @property
    def is_first(self) -> bool:
        """Whether this copy stands for all, as in a checkpoint."""
        return self.place == self.places[0]


def tie(parameter: nn.Parameter, to: TiedTo) -> None:
    parameter.tied_to = to  # type: ignore[attr-defined]


def tied_to(parameter: torch.Tensor) -> TiedTo | None:
    return getattr(parameter, "tied_to", None)
