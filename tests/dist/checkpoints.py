"""For the tests of checkpoints: a module of given shapes, its state as bytes, and a stranger's hand."""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

import lowband
from lowband.engine.checkpoint.manifest import MANIFEST
from lowband.spec.scheme import Scheme

ZERO3 = Scheme(name="zero3", weights="world", grads="world", optim="world")


class Bag(nn.Module):
    """Parameters and a buffer of given shapes; its gradients are set by hand."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], buffer: torch.Tensor) -> None:
        super().__init__()
        torch.manual_seed(3)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape)))
        self.register_buffer("seen", buffer.clone())


SHAPES = {"a": (4, 8), "b": (5,), "c": ()}
SEEN = torch.tensor([1.0, 2.0, 3.0])


def adamw(model: nn.Module, **options) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


def bag(
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
    buffer: torch.Tensor = SEEN,
    steps: int = 1,
):
    """A sharded Bag and its optimizer after some steps with gradients of one, of zero in the padding."""
    model = lowband.shard(Bag(shapes, buffer), ZERO3, lowband.Topology({}), nn.Linear, torch.float32)
    optimizer = make_optimizer(model)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = (parameter != 0).float()
        optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def goes_on(
    folder: Path, model: nn.Module, first: int, steps: Iterable[Any], loss_of: Callable[[Any], float],
    clip: float,
) -> tuple[list[float], dict[str, torch.Tensor]]:  # fmt: skip
    """Losses of the steps from `first` on, and the weights at the end. The state after step 0 is in the
    folder, or saved there if it is the first one.

    loss_of: takes a step's batches forward and backward
    """
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3), []
    checkpointer = lowband.Checkpointer(folder)
    if first:
        assert checkpointer.load_newest(model, optimizer) == {"step": 0}
    for number, step in enumerate(steps):
        if number < first:
            continue
        losses.append(loss_of(step))
        lowband.clip_grad_norm_(model, clip)
        optimizer.step()
        optimizer.zero_grad()
        if number == 0 and not first:
            checkpointer.save(0, model, optimizer, {"step": 0})
            checkpointer.wait()
    return losses, lowband.full_state_dict(model)


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> bytes:
    """All that a load may change on this rank: weights, states, param groups, buffers, random numbers."""
    tensors = [*model.parameters(), *model.buffers(), torch.get_rng_state()]
    states = []
    for parameter in model.parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            states.append(key)
            tensors.append(value if isinstance(value, torch.Tensor) else torch.tensor(value))
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    numbers = b"".join(t.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
    return repr((states, groups)).encode() + numbers


def change_manifest(checkpoint: Path, change: Callable[[dict], None]) -> None:
    """Change a manifest as a stranger would who knows the format: all sums are made to agree."""
    path = checkpoint / MANIFEST
    content = json.loads(path.read_text())
    change(content)
    for file, entry in zip(sorted(checkpoint.glob("rank-*.bin")), content["files"], strict=True):
        entry["bytes"] = file.stat().st_size
        entry["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    content.pop("sha256")
    content["sha256"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(content))
