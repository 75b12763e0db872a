"""DeepSpeed's ZeRO stages, hpZ and ZeRO++ as a peer.

Options set explicitly, because their default changed or distorts a comparison:

- `gradient_clipping`: the default became 1.0 after 0.19.2.
- `stage3_param_persistence_threshold` 0: otherwise parameters under 100,000 elements are never sharded.
- Blocks are "leaf modules", gathered whole, and one block is gathered ahead, as in our engine and FSDP2. The
  defaults, made for large models, would gather a small model whole, once, and shard nothing during a pass.
- The shared-memory op is disabled: it would be compiled at the first start, and no ZeRO stage uses it.
"""

import logging
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lowband.engine.transport.everyone import speaks_for_all
from lowband.errors import UserError
from lowband.model.gpt import GPT, Block
from lowband.spec.peers import peer_arguments, ranks_per_node
from lowband.spec.run import RunSpec
from lowband.trainers.trainer import Trainer, adamw

MakeOptimizer = Callable[[nn.Module, RunSpec], torch.optim.Optimizer]


class DeepSpeed(Trainer):
    """A GPT under `deepspeed.initialize`, with a torch optimizer."""

    def __init__(self, model: GPT, spec: RunSpec, make_optimizer: MakeOptimizer = adamw) -> None:
        """Raises UserError for a scheme without a counterpart in DeepSpeed, or if it is not installed."""
        zero = peer_arguments("deepspeed", spec.scheme, spec.levels)
        device = model.embed.weight.device
        deepspeed = load(device.type)
        os.environ["LOCAL_RANK"] = str(device.index or 0)
        # On a CPU DeepSpeed takes this as the number of devices per node.
        os.environ["LOCAL_SIZE"] = str(ranks_per_node(spec.scheme, spec.levels))
        if is_shimmed(zero, device):
            from lowband.trainers.deepspeed_quantizer import install

            install()
            self.notes = "shimmed"
        deepspeed.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
        self._names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        self._stage = zero["stage"]
        if self._stage == 3:
            deepspeed.utils.set_z3_leaf_modules(model, [Block])
        self.model, self.optimizer, _, _ = deepspeed.initialize(
            model=model, optimizer=make_optimizer(model, spec), config=configuration(spec, zero)
        )
        self._fp32 = deepspeed.utils.safe_get_full_fp32_param

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.model.set_gradient_accumulation_boundary(False)
        try:
            yield
        finally:
            self.model.set_gradient_accumulation_boundary(True)

    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss)

    def step(self, max_norm: float) -> float:
        """Clip and step; returns the norm before clipping. `max_norm` is in the configuration already."""
        if self._stage == 0:  # reports no norm; gradients are whole and averaged by now
            norm = torch.nn.utils.get_total_norm(
                [p.grad for p in self.model.parameters() if p.grad is not None]
            )
            self.model.step()
            return norm.item()
        self.model.step()
        return float(self.model.get_global_grad_norm())

    def full_state(self) -> dict[str, torch.Tensor]:
        parameters = dict(self.model.module.named_parameters(remove_duplicate=False))
        full = {}
        for name in self._names:
            value = parameters[name] if self._stage == 0 else self._fp32(parameters[name])
            full[name] = value.detach().cpu()
        return full if speaks_for_all() else {}


def configuration(spec: RunSpec, zero: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's configuration of a run; `zero` is the part that follows from the scheme."""
    return {
        "train_micro_batch_size_per_gpu": spec.micro_batch,
        "gradient_accumulation_steps": 1,  # the training loop sets the boundary and scales the loss
        "gradient_clipping": spec.grad_clip,
        "steps_per_print": 10**9,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {**zero, **_speed(spec, zero["stage"])},
        "bf16": {"enabled": spec.compute_dtype == "bf16"},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": spec.reduce_dtype,
    }


def _speed(spec: RunSpec, stage: int) -> dict[str, Any]:
    block = sum(math.prod(shape) for shape in spec.model.block_shapes().values())
    speed = {"overlap_comm": True, "reduce_bucket_size": block}
    if stage == 3:
        speed |= {
            "stage3_prefetch_bucket_size": block,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_reuse_distance": 0,
        }
    return speed


def is_shimmed(zero: dict[str, Any], device: torch.device) -> bool:
    """Whether DeepSpeed's quantizer, which has no CPU op, is replaced by torch code."""
    wants = zero.get("zero_quantized_weights") or zero.get("zero_quantized_gradients")
    return bool(wants) and device.type == "cpu"


def load(device_type: str) -> Any:
    """The package. Loading takes a second, so load before forking ranks. Raises UserError if missing."""
    os.environ.setdefault("DS_ACCELERATOR", device_type)
    try:
        import deepspeed
    except ImportError as error:
        what = f"DeepSpeed cannot be imported: {error}"
        raise UserError(what, allowed="pip install 'lowband[peers]'") from None
    deepspeed.utils.logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed
