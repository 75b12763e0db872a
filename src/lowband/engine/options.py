"""How a module is trained, beside its scheme."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from lowband.engine.arguments import refused
from lowband.engine.backend import backend
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


def device_of(given: torch.device | str | None, module: nn.Module) -> torch.device:
    """Where a module is trained: on the device of its values; of one on the meta device on the given one, or
    on that of the back end. A GPU has its index, because lanes are kept by device.

    Raises UserError for what is no device, and for another one than that of the values.
    """
    try:
        device = torch.device(given or ("cuda" if backend() == "nccl" else "cpu"))
    except (RuntimeError, TypeError):
        raise refused("lowband.shard", "device", given, "a device of torch's, such as 'cuda'") from None
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    devices = [parameter.device for parameter in module.parameters()]
    if not devices or any(each.type == "meta" for each in devices):
        return device
    if given is not None and (device.type, device.index or 0) != (devices[0].type, devices[0].index or 0):
        allowed = f"{devices[0]}, where the module has values, or a module on the meta device"
        raise refused("lowband.shard", "device", given, allowed)
    return devices[0]
