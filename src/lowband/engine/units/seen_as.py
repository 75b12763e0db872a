"""Parameters that a module computes with as DTensors, because torch's `parallelize_module` has cut it.

The engine's leaves are plain tensors, this tensor rank's slices. Whenever a unit is gathered, its module gets
new DTensors around them. A gradient comes back in the parameter's own placement: under torch's sequence
parallelism that of a norm is `Partial` until then, and a rank's part of it would be wrong without an error.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class SeenAs:
    """A DTensor's mesh, placements and whole shape: attribute `seen_as` of its local parameter."""

    mesh: Any
    placements: Any
    shape: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Any) -> "SeenAs":
        """Of a DTensor."""
        return cls(tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())

    def around(self, local: torch.Tensor) -> torch.Tensor:
        """The DTensor of which this is the local tensor, without a graph."""
        from torch.distributed.tensor import DTensor  # takes long, and a job without them needs none

        with torch.no_grad():
            whole: torch.Tensor = DTensor.from_local(
                local, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
            )
        return whole


def seen_as(parameter: torch.Tensor) -> SeenAs | None:
    """How the module sees the parameter; None: as it is."""
    return getattr(parameter, "seen_as", None)


def local_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A DTensor's local tensor, without a graph; None for any other tensor."""
    return getattr(tensor, "_local_tensor", None)


def shown(leaf: nn.Parameter, how: SeenAs | None) -> torch.Tensor:
    """What the module computes with; its gradient goes to the leaf."""
    if how is None:
        return leaf
    found: torch.Tensor = _Shown.apply(leaf, how)
    return found


class _Shown(torch.autograd.Function):
    @staticmethod
    @torch._disable_dynamo  # type: ignore[untyped-decorator]
    def forward(ctx: Any, leaf: torch.Tensor, how: SeenAs) -> torch.Tensor:
        ctx.how = how
        return how.around(leaf.view_as(leaf))

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        local: torch.Tensor = grad.redistribute(ctx.how.mesh, ctx.how.placements).to_local()
        return local if type(local) is torch.Tensor else local.clone(), None  # which waits for a collective
