"""Modules whose losses do not go through their units' outputs alone, and losses that use them."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Block(nn.Module):
    """A residual MLP and a gate, whose side loss an attribute keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)
        self.gate = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.compute(x)
        self.side = self.gate(x).softmax(-1).square().mean()
        return y

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Filling(Block):
    """Puts its side loss into a list that it is given."""

    def forward(self, x: torch.Tensor, sides: list[torch.Tensor]) -> torch.Tensor:
        y = self.compute(x)
        sides.append(self.gate(x).softmax(-1).square().mean())
        return y


class Before(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.side = self.gate(x).softmax(-1).square().mean()
        return self.compute(x)


class Penalty(Block):
    """On its own weights, through a product and through none."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.compute(x)
        self.side = self.down.weight.square().sum() + self.gate.bias.sum() + self.up.bias.square().sum()
        return y


class Map(Block):
    """A map that its own weights make of its result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.compute(x)
        self.side = F.linear(y, self.up.weight).tanh().mean()
        return y


class Recurrent(Block):
    """Its cell's forward binds a list of the cell's own weights to an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.cell(x)[0])))


class Negated(Block):
    """A view of its own weights whose sign changes when it is read."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = nn.Parameter(torch.linspace(-1, 1, 2 * WIDTH).view(WIDTH, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x) * torch.view_as_complex(self.turns).conj().imag


@dataclass(frozen=True)
class Result:
    y: torch.Tensor
    side: torch.Tensor
    count: int = 3


class Named(dict):
    """Of a class of its own, which torch's pytree does not open."""


class AsDataclass(Block):
    def forward(self, x: torch.Tensor) -> Result:
        return Result(super().forward(x), self.side)


class AsNamespace(Block):
    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(y=super().forward(x), side=self.side, count=3)


class AsDict(Block):
    def forward(self, x: torch.Tensor) -> Named:
        return Named(y=super().forward(x), side=self.side, count=3)


class Net(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = self.through(block, x)
        return self.head(x)

    def through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = block(x)
        if isinstance(y, dict):
            return y["y"]
        return y if isinstance(y, torch.Tensor) else y.y


class Summing(Net):
    """The root's forward adds the side losses up."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.total = 0.0
        return super().forward(x), self.total

    def through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = super().through(block, x)
        self.total = self.total + block.side
        return y


class Listing(Net):
    """The root keeps a list of the side losses."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.sides = []
        return super().forward(x), sum(self.sides)

    def through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = super().through(block, x)
        self.sides.append(block.side)
        return y


class Given(Net):
    """The root gives its blocks a list."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, sides = self.first(x), []
        for block in self.blocks:
            x = block(x, sides)
        return self.head(x), sum(sides)


class Whole(Net):
    """The root returns what its class says."""

    def __init__(self, returned: Callable[..., Any]) -> None:
        super().__init__(Block)
        self.returned = returned

    def forward(self, x: torch.Tensor) -> Any:
        return self.returned(y=super().forward(x), side=sum(block.side for block in self.blocks))


class Recomputed(Net):
    def through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().through, block, x, use_reentrant=False)


class Twice(Summing):
    """Each block runs twice."""

    def through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return super().through(block, super().through(block, x))


class Frozen(Net):
    """Nothing of a block's gate trains, and of the second block nothing but the gate's bias."""

    def __init__(self) -> None:
        super().__init__(Penalty)
        for block in self.blocks:
            block.gate.requires_grad_(False)
        self.blocks[1].requires_grad_(False)
        self.blocks[1].gate.bias.requires_grad_()


class Shared(Net):
    """The blocks' side loss uses a weight of the root, and of the block a view that has no gradient."""

    def through(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = super().through(block, x)
        block.side = block.side + (F.linear(y, self.head.weight) @ self.head.weight).square().mean()
        block.side = block.side + block.detached.square().mean()
        return y


class Detached(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.detached = y @ self.up.weight.detach().t()
        return y


class Inner(Block):
    """A unit with a backward inside of its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            [force] = torch.autograd.grad(super().forward(x).square().sum(), x, create_graph=True)
        return self.down(self.up(x)) + force


class Routed(Block):
    """Its data choose one of its experts, another one on each rank; the others get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        chosen = int(x.detach().sum().abs() * 1000) % len(self.experts)
        return x + self.experts[chosen](x)


class Returning(Net):
    """Its result, and a side loss on one of its weights, which it returns."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), self.first.weight


def with_weight(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y, weight = model(x)
    return y.square().mean() + weight.square().mean()


class Forces(Net):
    """Its result is a gradient of its own energy."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = super().forward(x).square().sum()
            [force] = torch.autograd.grad(energy, x, create_graph=True)
        return force @ self.first.weight.t()


def added(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The result's loss and the sides'."""
    return model(x).square().mean() + sum(block.side for block in model.blocks)


def first(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = model(x)
    return sum(block.side for block in model.blocks) + y.square().mean()


def alone(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    model(x)
    return sum(block.side for block in model.blocks)


def of_parts(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result = model(x)
    if isinstance(result, tuple):
        y, side = result
    elif isinstance(result, dict):
        y, side = result["y"], result["side"]
    else:
        y, side = result.y, result.side
    return y.square().mean() + side


def penalized(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A penalty on the gradient by the input."""
    x = x.clone().requires_grad_()
    y = model(x)
    [grad] = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + (grad.norm(dim=-1) - 1).square().mean()


def only_penalized(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    [grad] = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return grad.square().mean()


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


Program = tuple[Callable[[], nn.Module], Callable[[nn.Module, torch.Tensor], torch.Tensor]]

# Those that breadth-first accumulation runs, too: each is a chain of its units.
CHAINED: dict[str, Program] = {
    "after": (lambda: Net(Block), added),
    "after, added first": (lambda: Net(Block), first),
    "before": (lambda: Net(Before), added),
    "summed by the root": (lambda: Summing(Block), of_parts),
    "listed by the root": (lambda: Listing(Block), of_parts),
    "penalty": (lambda: Net(Penalty), added),
    "map": (lambda: Net(Map), added),
    "recurrent": (lambda: Net(Recurrent), added),
    "units return dataclasses": (lambda: Net(AsDataclass), added),
    "units return namespaces": (lambda: Net(AsNamespace), added),
    "units return dicts": (lambda: Net(AsDict), added),
    "dataclass": (lambda: Whole(Result), of_parts),
    "namespace": (lambda: Whole(SimpleNamespace), of_parts),
    "dict": (lambda: Whole(Named), of_parts),
    "sides alone": (lambda: Net(Block), alone),
    "blocks run twice": (lambda: Twice(Block), of_parts),
    "partly frozen": (Frozen, added),
    "the root's weight in side losses": (lambda: Shared(Detached), added),
    "penalties alone": (lambda: Net(Penalty), alone),
    "recomputed": (lambda: Recomputed(Block), squared),
    "negated view": (lambda: Net(Negated), squared),
    "experts by data": (lambda: Net(Routed), squared),
}
PROGRAMS: dict[str, Program] = CHAINED | {
    "in a list that blocks are given": (lambda: Given(Filling), of_parts),
    "gradient penalty": (lambda: Net(Block), penalized),
    "gradient penalty alone": (lambda: Net(Block), only_penalized),
    "gradient penalty, recomputed": (lambda: Recomputed(Block), penalized),
    "a gradient inside of units": (lambda: Net(Inner), squared),
    "forces": (lambda: Forces(Block), squared),
    "returns a weight": (lambda: Returning(Block), with_weight),
    "gradient penalty, partly frozen": (Frozen, penalized),
}
