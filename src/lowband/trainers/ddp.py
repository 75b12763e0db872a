"""PyTorch DistributedDataParallel as a peer."""

from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lowband.model.gpt import GPT
from lowband.spec.run import RunSpec
from lowband.trainers.trainer import Trainer, adamw


class Ddp(Trainer):
    """A GPT under DDP, in fp32."""

    def __init__(self, model: GPT, spec: RunSpec) -> None:
        self.model: DistributedDataParallel = DistributedDataParallel(model)
        self.optimizer = adamw(self.model, spec)
        self._whole = model

    def no_sync(self) -> AbstractContextManager[None]:
        return self.model.no_sync()

    def full_state(self) -> dict[str, torch.Tensor]:
        if dist.get_rank() != 0:
            return {}
        return {name: value.cpu() for name, value in self._whole.state_dict().items()}
