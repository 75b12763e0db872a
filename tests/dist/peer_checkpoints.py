"""For the tests of peers' checkpoints: a module of odd sizes, its batches, its training under each peer."""

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lowband.trainers import deepspeed as peer

VOCAB, WIDTH, ROWS = 11, 7, 6  # no size is a multiple of two ranks but the batch
SAVED, LAST = 2, 5  # steps
LR = {True: 0.02, False: 0.01}  # of matrices, and of the others


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.up(self.norm(x)))


class Net(nn.Module):
    """Tokens -> loss; input and output share their weights."""

    def __init__(self, seed: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([0.1 * seed, 2.0]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) * self.scale[0]
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(1, 1).flatten())


def batch(step: int) -> torch.Tensor:
    """This rank's rows of a step: the step's batch does not depend on the number of ranks."""
    rows = torch.randint(VOCAB, (ROWS, 4), generator=torch.Generator().manual_seed(step))
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


def groups(parameters: Any) -> list[dict[str, Any]]:
    """Matrices decay, others do not; each has a learning rate of its own."""
    named = list(parameters)
    return [
        {"params": [p for p in named if (p.ndim > 1) == is_matrix], "lr": lr, "weight_decay": 0.3 * is_matrix}
        for is_matrix, lr in LR.items()
    ]


def mean_loss(loss: torch.Tensor) -> float:
    dist.all_reduce(total := loss.detach().clone())
    return float(total) / dist.get_world_size()


def train_fsdp2(folder: Path, make: Any = torch.optim.AdamW) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Whole weights when they were saved, and the losses of the steps behind."""
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = make(groups(model.parameters()))
    weights, losses = {}, []
    for step in range(1, LAST + 1):
        loss = model(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_loss(loss))
        if step == SAVED:
            of_model, of_optimizer = get_state_dict(model, optimizer)
            dcp.save(
                {"app": {"model": of_model, "optimizer": of_optimizer}, "step": step}, checkpoint_id=folder
            )
            weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
            weights = {name: value.clone() for name, value in weights.items()}
    return weights, losses[SAVED:]


def train_deepspeed(folder: Path, stage: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same under ZeRO."""
    deepspeed = peer.load("cpu")
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_SIZE": str(dist.get_world_size())}
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False)
    model = Net()
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(groups(model.parameters())),
        config={
            "train_micro_batch_size_per_gpu": ROWS // dist.get_world_size(),
            "gradient_clipping": 0.0,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        },
    )
    weights, losses = {}, []
    for step in range(1, LAST + 1):
        loss = engine(batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(mean_loss(loss))
        if step == SAVED:
            engine.save_checkpoint(str(folder), client_state={"step": step})
            fp32 = deepspeed.utils.safe_get_full_fp32_param
            named = engine.module.named_parameters(remove_duplicate=False)
            weights = {name: fp32(value).detach().clone() for name, value in named}
            weights |= {name: value.clone() for name, value in engine.module.named_buffers()}
    return weights, losses[SAVED:]
