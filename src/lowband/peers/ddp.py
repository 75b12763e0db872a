"""PyTorch DistributedDataParallel as a peer."""

from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lowband.errors import UserError
from lowband.model.gpt import GPT
from lowband.spec.machine import SELF
from lowband.spec.scheme import Scheme


class Ddp:
    """A GPT under DDP, in fp32: DDP has no mixed precision with fp32 master weights of its own."""

    def __init__(self, model: GPT, scheme: Scheme, compute_dtype: torch.dtype) -> None:
        """Raises UserError for a scheme or dtype that DDP has no counterpart of."""
        where = f"scheme '{scheme.name}' under DDP"
        if {scheme.weights, scheme.grads, scheme.optim} != {SELF} or scheme.is_quantized:
            raise UserError("DDP shards nothing", where=where, allowed="ddp")
        if compute_dtype != torch.float32:
            raise UserError("DDP keeps no fp32 master weights", where=where, allowed="compute_dtype fp32")
        self.model: nn.Module = DistributedDataParallel(model)
        self._whole = model

    def no_sync(self) -> AbstractContextManager[None]:
        assert isinstance(self.model, DistributedDataParallel)
        return self.model.no_sync()

    def clip_grad_norm(self, max_norm: float) -> float:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm).item()

    def full_state(self) -> dict[str, torch.Tensor]:
        if dist.get_rank() != 0:
            return {}
        return {name: value.cpu() for name, value in self._whole.state_dict().items()}
