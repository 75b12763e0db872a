"""A spec's model made ready for training, by our engine or by a peer: the same calls for all."""

from contextlib import AbstractContextManager
from typing import Protocol

import torch
from torch import nn

from lowband.engine.api import clip_grad_norm_, full_state_dict, no_sync, shard
from lowband.engine.topology import Topology
from lowband.model.gpt import GPT, Block
from lowband.peers.ddp import Ddp
from lowband.peers.fsdp2 import Fsdp2
from lowband.spec.run import RunSpec

TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Prepared(Protocol):
    """What the training loop asks of an engine. `model.parameters()` go to the optimizer."""

    model: nn.Module

    def no_sync(self) -> AbstractContextManager[None]:
        """Context of the backward passes before an accumulation boundary."""

    def clip_grad_norm(self, max_norm: float) -> float:
        """Clip the gradients by their global norm; returns the norm before."""

    def full_state(self) -> dict[str, torch.Tensor]:
        """Logical fp32 tensors under the module's own names on rank 0; elsewhere {}."""


class Lowband:
    """A GPT under our engine."""

    def __init__(self, model: GPT, spec: RunSpec) -> None:
        self.model = shard(
            model,
            spec.scheme,
            Topology(spec.machine.sizes),
            wrap=Block,
            compute_dtype=TORCH_DTYPE[spec.compute_dtype],
            reduce_dtype=TORCH_DTYPE[spec.reduce_dtype],
            overlap=spec.overlap,
        )

    def no_sync(self) -> AbstractContextManager[None]:
        return no_sync(self.model)

    def clip_grad_norm(self, max_norm: float) -> float:
        return clip_grad_norm_(self.model, max_norm)

    def full_state(self) -> dict[str, torch.Tensor]:
        return full_state_dict(self.model)


def prepare(spec: RunSpec, device: torch.device) -> Prepared:
    """The spec's model under the spec's engine. Raises UserError where a peer has no such scheme."""
    with device:
        model = GPT(spec.model, seed=spec.seed)
    compute_dtype = TORCH_DTYPE[spec.compute_dtype]
    if spec.engine == "fsdp2":
        return Fsdp2(model, spec.scheme, spec.levels, compute_dtype, TORCH_DTYPE[spec.reduce_dtype])
    if spec.engine == "ddp":
        return Ddp(model, spec.scheme, compute_dtype)
    return Lowband(model, spec)
