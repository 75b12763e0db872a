"""PyTorch DistributedDataParallel as a peer: as it is, with PowerSGD, or with Local SGD."""

from contextlib import AbstractContextManager

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel

from lowband.engine.transport.everyone import speaks_for_all
from lowband.model.gpt import GPT
from lowband.spec.peers import peer_arguments
from lowband.spec.run import RunSpec
from lowband.trainers.trainer import Trainer, adamw

# The hook starts a bucket's second all-reduce when the first one has ended, in any order of the buckets; gloo
# matches messages in the order in which they come, so two buckets end in a crash (tried with torch 2.13).
ONE_BUCKET_MB = 2**20
FIRST_COMPRESSED = 2  # step; DDP rebuilds its buckets in the first one, and PowerSGD keeps errors by bucket


class Ddp(Trainer):
    """A GPT under DDP, in fp32."""

    def __init__(self, model: GPT, spec: RunSpec) -> None:
        is_compressed = spec.engine == "powersgd"  # see ONE_BUCKET_MB
        self.model: DistributedDataParallel = DistributedDataParallel(
            model, bucket_cap_mb=ONE_BUCKET_MB if is_compressed else None
        )
        self.optimizer = adamw(self.model, spec)
        self._whole = model
        arguments = peer_arguments(spec.engine, spec.scheme, spec.levels)
        if is_compressed:
            state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=FIRST_COMPRESSED, **arguments)
            self.model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif arguments:
            self._make_replicas(**arguments)

    def _make_replicas(self, period: int, replica: int) -> None:
        """Average gradients within `replica` ranks, and all weights after each `period` steps."""
        from torch.distributed.optim import PostLocalSGDOptimizer  # a second, which other runs need not spend

        group, _ = dist.new_subgroups(replica)
        local = post_localSGD_hook.PostLocalSGDState(None, group, start_localSGD_iter=0)
        self.model.register_comm_hook(local, post_localSGD_hook.post_localSGD_hook)
        # It averages after the first step that follows the warm-up, and then after every period.
        averager = PeriodicModelAverager(period, warmup_steps=period - 1)
        self.optimizer = PostLocalSGDOptimizer(self.optimizer, averager)

    def no_sync(self) -> AbstractContextManager[None]:
        return self.model.no_sync()

    def full_state(self) -> dict[str, torch.Tensor]:
        if not speaks_for_all():
            return {}
        return {name: value.cpu() for name, value in self._whole.state_dict().items()}
