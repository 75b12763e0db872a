"""A rank's part of a parameter that ranks along tensor or expert divide."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lowband.errors import UserError
from lowband.spec.axes import AxisName


@dataclass(frozen=True)
class SliceOf:
    """What a module's parameter is a slice of: attribute `slice_of` of the parameter.

    shape: of the whole parameter
    dim:   the dimension that is cut
    parts: equal parts along it that are cut each, such as queries, keys and values in one matrix
    place: this rank's number among `ranks`, the ranks along the axis
    axis:  along which it is cut
    """

    shape: torch.Size
    dim: int
    parts: int
    place: int
    ranks: int
    axis: AxisName = field(default="tensor", compare=False)

    def cut(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's slice of the whole parameter, or of values of its shape; a view where that can be."""
        parts = whole.unflatten(self.dim, (self.parts, self.ranks, -1))
        return parts.select(self.dim + 1, self.place).flatten(self.dim, self.dim + 1)

    def join(self, slices: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole, from the slices of all ranks in order."""
        parts = [each.unflatten(self.dim, (self.parts, -1)) for each in slices]
        return torch.stack(parts, self.dim + 1).flatten(self.dim, self.dim + 2)


def slice_of(parameter: torch.Tensor) -> SliceOf | None:
    """What the parameter is a slice of; None if every rank has it whole."""
    return getattr(parameter, "slice_of", None)


def is_of_expert(parameter: torch.Tensor) -> bool:
    """Whether it is of this rank's experts, of which other ranks along the data axis have others."""
    of = slice_of(parameter)
    return of is not None and of.axis == "expert"


def refuse_wholes(module: nn.Module) -> None:
    """Have its `load_state_dict` say of a whole parameter that it is cut, before torch lists the sizes."""
    module.register_load_state_dict_pre_hook(_refuse_wholes)


def _refuse_wholes(module: nn.Module, state: Mapping[str, Any], prefix: str, *_: Any) -> None:
    for name, parameter in module.named_parameters():
        of, given = slice_of(parameter), state.get(prefix + name)
        if of is not None and isinstance(given, torch.Tensor) and given.shape == of.shape:
            raise UserError(
                f"'{prefix}{name}' is whole, and cut over {of.axis} ranks in the module",
                where="load_state_dict()",
                allowed="weights loaded before the module is cut, or by init= of lowband.shard",
            )


def mark_partial(parameters: Iterable[nn.Parameter]) -> None:
    """Their gradients are partial sums: see parallel.tensor, [Note: shared]."""
    for parameter in parameters:
        parameter.is_partial_sum = True  # type: ignore[attr-defined]


def is_partial(parameter: nn.Parameter) -> bool:
    return getattr(parameter, "is_partial_sum", False)


def is_alike(parameter: nn.Parameter) -> bool:
    """Whether every tensor rank has it whole, and computes all of its gradient."""
    of = slice_of(parameter)
    return (of is None or of.axis != "tensor") and not is_partial(parameter)
