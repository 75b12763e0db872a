"""PyTorch FSDP2 (`fully_shard`) as a peer."""

from contextlib import AbstractContextManager, contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from lowband.errors import UserError
from lowband.model.gpt import GPT
from lowband.spec.machine import SELF, WORLD, Levels
from lowband.spec.scheme import Scheme


class Fsdp2:
    """A GPT under `fully_shard`, each block one unit, in the placement of a scheme."""

    def __init__(
        self,
        model: GPT,
        scheme: Scheme,
        levels: Levels,
        compute_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
    ) -> None:
        """Raises UserError for a scheme that FSDP2 has no counterpart of."""
        arguments = mesh_arguments(scheme, levels)
        mesh = init_device_mesh(
            model.embed.weight.device.type,
            arguments["mesh_shape"],
            mesh_dim_names=("replicate", "shard")[-len(arguments["mesh_shape"]) :],
        )
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
        for block in model.blocks:
            fully_shard(
                block, mesh=mesh, mp_policy=policy, reshard_after_forward=arguments["reshard_after_forward"]
            )
        fully_shard(model, mesh=mesh, mp_policy=policy)
        self.model: nn.Module = model

    def no_sync(self) -> AbstractContextManager[None]:
        return self._no_sync()

    @contextmanager
    def _no_sync(self):
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)

    def clip_grad_norm(self, max_norm: float) -> float:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        return norm.full_tensor().item()  # type: ignore[attr-defined] - a DTensor

    def full_state(self) -> dict[str, torch.Tensor]:
        """Logical tensors on rank 0; elsewhere {}."""
        full = {name: value.full_tensor().cpu() for name, value in self.model.state_dict().items()}
        return full if dist.get_rank() == 0 else {}


def mesh_arguments(scheme: Scheme, levels: Levels) -> dict:
    """Shape of the device mesh and `reshard_after_forward` of a scheme; UserError where there is none."""
    where = f"scheme '{scheme.name}' under FSDP2"
    if scheme.is_quantized:
        raise UserError("FSDP2 has no quantized collectives", where=where)
    shard = levels.size(scheme.optim)
    if levels.size(scheme.grads) != shard:
        raise UserError("FSDP2 keeps gradients where it keeps the optimizer state", where=where)
    shape = (shard,) if shard == levels.world else (levels.world // shard, shard)
    if scheme.weights == SELF:
        if scheme.optim != WORLD:
            raise UserError("FSDP2 shards parameters between steps; DDP is the counterpart", where=where)
        return {"mesh_shape": shape, "reshard_after_forward": False}
    if levels.size(scheme.weights) != shard:
        raise UserError("FSDP2 keeps weights where it keeps the optimizer state", where=where)
    if scheme.secondary is None or levels.size(scheme.secondary) == shard:
        return {"mesh_shape": shape, "reshard_after_forward": True}
    return {"mesh_shape": shape, "reshard_after_forward": levels.size(scheme.secondary)}
