"""Modules that are chains of their units, and training them breadth-first."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from modules import HPZ, INNER, inputs, is_layer, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowband
from lowband.spec.scheme import Scheme

RANKS, STEPS, MICRO_BATCHES = 4, 2, 3


class Chain(nn.Module):
    """Layers in a row, of odd sizes; an unused parameter; a head that shares nothing."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(5, 7)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(7, n), nn.Tanh(), nn.Linear(n, 7)) for n in (3, 40, 5)
        )
        self.head = nn.Linear(7, 3)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = self.through(layer, x)
        return self.head(x).square().mean()

    def through(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x)


class FrozenStart(Chain):
    """Of the embedding and a layer nothing trains, of another one only a part."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in (*self.first.parameters(), *self.layers[0].parameters(), self.layers[1][0].bias):
            parameter.requires_grad_(False)


class FrozenEnd(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].requires_grad_(False)


class Shared(Chain):
    """A layer is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(self.layers[1])


class Earlier(Chain):
    """The head also uses the first layer's output, and the layers return tuples."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = [self.first(x)]
        for layer in self.layers:
            outputs.append(layer(outputs[-1]))
        return self.head(outputs[-1] + outputs[1]).square().mean()


class Recomputed(Chain):
    reentrant = False

    def through(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=self.reentrant)


def micro(step: int, i: int, rank: int) -> torch.Tensor:
    return inputs(10 * step + i, rank)


def sharded(make: Callable[[], nn.Module], scheme: Scheme = HPZ) -> nn.Module:
    return lowband.shard(make(), scheme, lowband.Topology(INNER), is_layer, compute_dtype=torch.float32)


def accumulated(model: nn.Module, step: int) -> list[torch.Tensor]:
    parts = [micro(step, i, dist.get_rank()) for i in range(MICRO_BATCHES)]
    return lowband.accumulate(model, parts, lambda x: model(x) / MICRO_BATCHES)


def train(model: nn.Module, between: Callable[[nn.Module], object] = lambda model: None) -> None:
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    for step in range(STEPS):
        accumulated(model, step)
        optimizer.step()
        optimizer.zero_grad()
        between(model)


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return lowband.full_state_dict(model)
