"""PyTorch's own axes, for trainers with FSDP2: one mesh, `parallelize_module`, a norm over all of it."""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lowband.engine.collectives.wire import TORCH_DTYPE
from lowband.model.gpt import GPT, Block
from lowband.spec.peers import peer_arguments
from lowband.spec.run import RunSpec


class Mesh:
    """The ranks of a run: pipeline outermost, then data as FSDP2 has it for the scheme, tensor innermost.

    data:    of one dimension, or of two: replicate and shard
    tensor:  None without ranks along it
    reshard: FSDP2's `reshard_after_forward`
    is_on_host: whether shards and the optimizer's states lie in the host's memory
    is_first_of_stage: whether this rank is the first that has its part of the model
    """

    def __init__(self, spec: RunSpec, device: torch.device) -> None:
        """Raises UserError for a scheme without a counterpart in FSDP2."""
        arguments = peer_arguments("fsdp2", spec.scheme, spec.levels)
        sizes = tuple(arguments["mesh_shape"])
        names = ("replicate", "shard")[-len(sizes) :]
        whole = init_device_mesh(
            device.type,
            (spec.pipeline, *sizes, spec.tensor),
            mesh_dim_names=("pipeline", *names, "tensor"),
        )
        self.pipeline, self.data = whole["pipeline"], whole[names]
        self.tensor: DeviceMesh | None = whole["tensor"] if spec.tensor > 1 else None
        self.is_on_host = "offload_policy" in arguments
        self._options: dict[str, Any] = {
            "mesh": self.data,
            "mp_policy": MixedPrecisionPolicy(
                TORCH_DTYPE[spec.compute_dtype], TORCH_DTYPE[spec.reduce_dtype]
            ),
        }
        if self.is_on_host:
            self._options["offload_policy"] = CPUOffloadPolicy(pin_memory=device.type == "cuda")
        self.reshard: bool | int = arguments["reshard_after_forward"]
        self.is_first_of_stage = not any(whole.get_coordinate()[1:])  # type: ignore[index]

    def shard(self, part: nn.Module, reshard_part: bool | int | None) -> None:
        """`fully_shard` on each block of a part of the model, and on the part.

        reshard_part: of what is in no block; None: as torch decides
        """
        for module in [*part.modules()]:
            if isinstance(module, Block):
                fully_shard(module, reshard_after_forward=self.reshard, **self._options)
        fully_shard(part, reshard_after_forward=reshard_part, **self._options)


def cut_along_tensor(model: GPT, mesh: DeviceMesh) -> None:
    """As `lowband.parallelize` by our plan of a GPT; but logits are joined before the loss.

    A column product's rows are divided in order, so each rank's queries, keys and values are put together.
    """
    for block in model.blocks:
        for parameter in block.attention.qkv.parameters():  # type: ignore[union-attr]
            parameter.data = _together(parameter.data, mesh.size())
    whole = Replicate()
    plan = {
        "embed": RowwiseParallel(input_layouts=whole, output_layouts=whole),
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=whole),
    }
    parallelize_module(model, mesh, plan)


def _together(rows: torch.Tensor, ranks: int) -> torch.Tensor:
    return rows.unflatten(0, (3, ranks, -1)).transpose(0, 1).flatten(0, 2).contiguous()


def _apart(rows: torch.Tensor, ranks: int) -> torch.Tensor:
    return rows.unflatten(0, (ranks, 3, -1)).transpose(0, 1).flatten(0, 2).contiguous()


def whole_tensors(named: Iterable[tuple[str, torch.Tensor]], ranks: int) -> dict[str, torch.Tensor]:
    """This rank's part of the model, undivided. ranks: along tensor. All ranks that have it must call this"""
    found = {}
    for name, value in named:
        full = value.to(value.device_mesh.device_type).full_tensor() if isinstance(value, DTensor) else value
        found[name] = (_apart(full, ranks) if ".qkv." in name and ranks > 1 else full).cpu()
    return found


@torch.no_grad()
def clip_over_axes(parameters: Iterable[nn.Parameter], max_norm: float, tensor: int) -> torch.Tensor:
    """Scale the gradients to a norm over all ranks, of which torch's function takes one mesh alone.

    tensor: ranks along it, which all have what is no DTensor there
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    sharded = [grad for grad in grads if isinstance(grad, DTensor)]
    assert len(sharded) == len(grads)
    device_type = sharded[0].device_mesh.device_type  # of messages; gradients may lie in the host's memory
    total = torch.zeros((), dtype=torch.float64, device=device_type)
    for grad in sharded:
        mesh, copies = grad.device_mesh, 1
        for dim, placement in enumerate(grad.placements):
            copies *= mesh.size(dim) if placement.is_replicate() else 1
        copies *= 1 if "tensor" in (mesh.mesh_dim_names or ()) else tensor
        total += grad.to_local().double().square().sum().to(device_type) / copies
    dist.all_reduce(total)
    norm = total.sqrt()
    for grad in sharded:
        grad.to_local().mul_(torch.clamp(max_norm / norm, max=1.0).to(grad.device))
    return norm
