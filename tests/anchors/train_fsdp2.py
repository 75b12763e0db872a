"""Train under torchrun with FSDP2 and torch.distributed.checkpoint, as torch's tutorials and torchtitan do.

`Stateful` wrapper: https://docs.pytorch.org/tutorials/recipes/distributed_checkpoint_recipe.html. A folder
for each checkpoint; a whole one has `.metadata`, which DCP writes last (torchtitan/components/checkpoint.py).
"""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lowband.model.gpt import GPT
from tests.anchors.peer import Arguments, Batches, Records


class AppState(Stateful):
    """Model and optimizer, for DCP."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


def newest(checkpoints: Path) -> Path | None:
    """The newest whole checkpoint."""
    return max((path.parent for path in checkpoints.glob("step-*/.metadata")), default=None)


def main() -> None:
    arguments = Arguments.parse()
    spec, checkpoints = arguments.spec, arguments.folder / "checkpoints"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=arguments.timeout)
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = GPT(spec.model, spec.seed)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec.learning_rate, weight_decay=spec.weight_decay)
    batches, records, done = Batches(spec, rank), Records(arguments.folder, rank), 0
    if (path := newest(checkpoints)) is not None:
        dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=path)
        done = int(path.name.removeprefix("step-"))
    records.start(done)
    for step in range(done + 1, spec.steps + 1):
        loss = model(*batches.of_step(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), spec.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
        records.step(step, loss)
        if step % spec.checkpoint_every == 0:
            dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=checkpoints / f"step-{step:08d}")
    records.final(get_model_state_dict(model, options=StateDictOptions(full_state_dict=True)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
