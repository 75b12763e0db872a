"""Small modules for the tests of `lowband.shard`, and the usual loop on one device and on ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowband
from lowband.spec.scheme import Scheme

INNER = {"package": 2, "node": 4}  # of slurm/local


HIER3 = Scheme(name="hier3-exact", weights="package", grads="node", optim="world")

HPZ = Scheme(name="hpz", weights="world", secondary="node", grads="world", optim="world")

STEPS = 2  # the second has new weights, and the optimizer's state


class Tower(nn.Module):
    """Odd sizes, parameters smaller than the group, a buffer, a scalar, an unused parameter."""

    def __init__(self, checkpointing: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(5, 7)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 7)) for _ in range(3)
        )
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.linspace(0, 1, 7))
        self.checkpointing, self.reentrant = checkpointing, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + self.shift
        for layer in self.layers:
            y = checkpoint(layer, x, use_reentrant=self.reentrant) if self.checkpointing else layer(x)
            x = x + y * self.scale
        return x.square().mean()


def is_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.Sequential)


def inputs(step: int, rank: int) -> torch.Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def loop(model: nn.Module, make_optimizer, batches) -> list[float]:
    """The usual loop; `batches(step)` gives one or more inputs whose losses are averaged."""
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    losses = []
    for step in range(STEPS):
        parts = batches(step)
        total = 0.0
        for part in parts:
            loss = model(part) / len(parts)
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def sharded(make_model, make_optimizer, scheme: Scheme, wrap):
    model = lowband.shard(make_model(), scheme, lowband.Topology(INNER), wrap, compute_dtype=torch.float32)
    loop(model, make_optimizer, lambda step: [inputs(step, dist.get_rank())])
    return lowband.full_state_dict(model)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-1, momentum=0.9, nesterov=True)


class HalfFrozen(Tower):
    def __init__(self) -> None:
        super().__init__()
        for parameter in (*self.first.parameters(), *self.layers[1].parameters(), self.layers[0][0].bias):
            parameter.requires_grad_(False)


class Adapted(nn.Module):
    """A tower of frozen layers, each with a small trainable adapter, as in LoRA."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.first = nn.Linear(5, 64)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, bias=False)) for _ in range(6)
        )
        for layer in self.layers:
            layer[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()
