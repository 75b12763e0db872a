"""How a module is trained, beside its scheme."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from lowband.engine.arguments import refused
from lowband.engine.disk import Disk
from lowband.errors import UserError
from lowband.spec.step import Pattern
from lowband.spec.tiers import DEVICE, HOST, Tier

_DTYPES = torch.float32, torch.bfloat16, torch.float16, torch.float64


@dataclass(frozen=True)
class Options:
    """Arguments of `lowband.shard`, handed on as one.

    compute_dtype: of weights and activations
    reduce_dtype:  in which gradients are sent and summed
    overlap:       whether collectives run behind the computation
    pattern:       how collectives run where values travel unchanged
    activations:   the tier of what units' forwards keep for the backward; or, of a wrapped module, which
    disk:          where states lie that a scheme places on a disk; or None
    """

    compute_dtype: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype = torch.float32
    overlap: bool = True
    pattern: Pattern = "hops"
    disk: Disk | None = None
    activations: Tier | Callable[[nn.Module], Tier] = DEVICE

    def __post_init__(self) -> None:
        """Raises UserError for dtypes in which no gradient or weight could be told from another."""
        for name in ("compute_dtype", "reduce_dtype"):
            if (dtype := getattr(self, name)) not in _DTYPES:
                raise UserError(f"{name} is {dtype!r}", where="lowband.shard", allowed=_DTYPES)
        if not callable(self.activations):
            self.activations_of(nn.Identity())

    def activations_of(self, wrapped: nn.Module) -> Tier:
        """Raises UserError for another tier than these two."""
        tier = self.activations(wrapped) if callable(self.activations) else self.activations
        if tier not in (DEVICE, HOST):
            raise UserError(f"activations in '{tier}'", where="lowband.shard", allowed=(DEVICE, HOST))
        return tier


def device_of(given: torch.device | str | None) -> torch.device:
    """The given device, or that of the back end; a GPU with its index, because lanes are kept by device.

    Raises UserError for what is no device.
    """
    try:
        device = torch.device(given or ("cuda" if dist.get_backend() == "nccl" else "cpu"))
    except (RuntimeError, TypeError):
        raise refused("lowband.shard", "device", given, "a device of torch's, such as 'cuda'") from None
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
