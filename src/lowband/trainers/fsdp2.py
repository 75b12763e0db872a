"""PyTorch FSDP2 (`fully_shard`) as a peer."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lowband.engine.collectives.wire import TORCH_DTYPE
from lowband.engine.transport.everyone import speaks_for_all
from lowband.model.gpt import GPT
from lowband.spec.peers import peer_arguments
from lowband.spec.run import RunSpec
from lowband.trainers.trainer import Trainer, adamw


class Fsdp2(Trainer):
    """A GPT under `fully_shard`, one unit per block, in a scheme's placement."""

    def __init__(self, model: GPT, spec: RunSpec) -> None:
        """Raises UserError for a scheme without a counterpart in FSDP2."""
        arguments = peer_arguments("fsdp2", spec.scheme, spec.levels)
        shape = tuple(arguments["mesh_shape"])
        mesh = init_device_mesh(
            model.embed.weight.device.type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :]
        )
        policy = MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE[spec.compute_dtype], reduce_dtype=TORCH_DTYPE[spec.reduce_dtype]
        )
        for block in model.blocks:
            fully_shard(
                block, mesh=mesh, mp_policy=policy, reshard_after_forward=arguments["reshard_after_forward"]
            )
        fully_shard(model, mesh=mesh, mp_policy=policy)
        self.model = model
        self.optimizer = adamw(model, spec)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def _clip_grad_norm(self, max_norm: float) -> torch.Tensor:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        full: torch.Tensor = norm.full_tensor()  # type: ignore[attr-defined] - a DTensor
        return full

    def full_state(self) -> dict[str, torch.Tensor]:
        full = {name: value.full_tensor().cpu() for name, value in self.model.state_dict().items()}
        return full if speaks_for_all() else {}
