"""A parameter or buffer that stages on several ranks of a pipeline share: attribute `tied_to` of it."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TiedTo:
    """What this rank's copy is one of. Each rank has a parameter in a unit of its own, so that all have equal
    shards.

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


def tie(tensor: torch.Tensor, to: TiedTo) -> torch.Tensor:
    tensor.tied_to = to  # type: ignore[attr-defined]
    return tensor


def tied_to(tensor: torch.Tensor) -> TiedTo | None:
    return getattr(tensor, "tied_to", None)
