"""Prepare a spec's model for training, by our engine or by a peer."""

from pathlib import Path

import torch

from lowband.model.gpt import GPT
from lowband.spec.run import RunSpec
from lowband.trainers.ddp import Ddp
from lowband.trainers.deepspeed import DeepSpeed
from lowband.trainers.fsdp2 import Fsdp2
from lowband.trainers.lowband import Lowband
from lowband.trainers.torch_pipeline import TorchPipeline
from lowband.trainers.trainer import Trainer

_PEERS = {"ddp": Ddp, "powersgd": Ddp, "fsdp2": Fsdp2, "deepspeed": DeepSpeed}


def prepare(spec: RunSpec, device: torch.device, disk: Path | None = None) -> Trainer:
    """The spec's model under the spec's engine. Raises UserError if a peer has no such scheme.

    disk: folder for states that the scheme places there
    """
    is_deferred = spec.engine == "lowband"
    with torch.device("meta") if is_deferred else device:
        recompute = "none" if spec.recompute == "host" else spec.recompute
        model = GPT(spec.model, spec.seed, spec.attention, recompute, spec.loss_chunks, spec.recomputed)
    if spec.compile:
        model.compile_parts()
    if is_deferred:
        return Lowband(model, spec, device, disk)
    if spec.is_in_stages:
        return TorchPipeline(model, spec)
    return _PEERS[spec.engine](model, spec)
