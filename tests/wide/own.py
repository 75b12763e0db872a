"""Small modules of ours: units that keep side losses, and results that are no tensors."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.wide.cases import Case, Own

VOCABULARY, WIDTH, LENGTH = 13, 6, 5


@dataclass
class Result:
    """What a unit or the root returns as a dataclass."""

    y: torch.Tensor
    side: torch.Tensor
    name: str = "result"


class Fields(dict):  # type: ignore[type-arg]
    """A dict of a class of its own."""


def returned(kind: str, y: torch.Tensor, side: torch.Tensor) -> Any:
    match kind:
        case "tuple":
            return y, side
        case "dataclass":
            return Result(y, side)
        case "namespace":
            return SimpleNamespace(y=y, side=side)
        case "dict":
            return Fields(y=y, side=side, name="result")
    return y


def parts(result: Any) -> tuple[torch.Tensor, Any]:
    """The values of what `returned` made; no side of a tensor."""
    if isinstance(result, torch.Tensor):
        return result, 0.0
    if isinstance(result, tuple):
        return result
    if isinstance(result, dict):
        return result["y"], result["side"]
    return result.y, result.side


class Attention(nn.Module):
    """One head, which keeps its map."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.into(x).chunk(3, -1)
        self.map = (query @ key.mT / WIDTH**0.5).softmax(-1)
        return self.out(self.map @ value)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x)[0]


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.over_time, self.norm = nn.Conv1d(WIDTH, WIDTH, 3, padding=1), nn.GroupNorm(2, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.over_time(x.mT)).mT


class Statistics(nn.Module):
    """With running statistics, which are each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)  # which cancels what is linear before it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.into(x).tanh().mT).mT)


def mixer(own: Own) -> nn.Module:
    match own.mixer:
        case "statistics":
            return Statistics()
        case "transformer":
            return nn.TransformerEncoderLayer(WIDTH, 2, 9, dropout=0.0, batch_first=True)
        case "attention":
            return Attention()
        case "recurrent":
            return Recurrent()
        case "convolution":
            return Convolution()
    return nn.Sequential(nn.Linear(WIDTH, 9), nn.GELU(), nn.Linear(9, WIDTH))


class Unit(nn.Module):
    """A residual layer with a gate of its own, which a side loss may use."""

    def __init__(self, own: Own, dropout: float) -> None:
        super().__init__()
        self.own, self.dropout = own, dropout
        self.norm, self.mixer, self.gate = nn.LayerNorm(WIDTH), mixer(own), nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor) -> Any:
        if self.own.side == "before":
            self.side = self.balance(x)
        y = x + F.dropout(self.mixer(self.norm(x)) * self.scale, self.dropout, self.training)
        if self.own.side == "after":
            self.side = self.balance(x)
        elif self.own.side == "penalty":
            self.side = self.gate.weight.square().mean() + self.norm.weight.square().mean() + self.scale**2
        elif self.own.side == "map":
            kept = self.mixer.map if isinstance(self.mixer, Attention) else F.linear(y, self.gate.weight)
            self.side = kept.tanh().square().mean()
        return returned(self.own.by_units, y, getattr(self, "side", y.detach().mean()))

    def balance(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(x).softmax(-1).square().mean()


class Net(nn.Module):
    """Tokens to logits. The gates train only where there are side losses."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        assert case.own is not None
        self.own, self.checkpointing = case.own, case.checkpointing
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Unit(case.own, 0.1 if case.has_dropout else 0.0) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not case.is_tied)
        if case.is_tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> Any:
        x, total = self.tokens(tokens), torch.zeros(())
        self.sides = []
        for layer in [*self.layers, *([self.layers[0]] if self.own.is_reused else [])]:
            x, _ = parts(self.through(layer, x))
            if self.own.side != "none" and self.own.summed == "root":
                total = total + layer.side
            elif self.own.side != "none" and self.own.summed == "list":
                self.sides.append(layer.side)
        self.kept = x.detach()
        return returned(self.own.by_root, self.head(x), total)

    def through(self, layer: nn.Module, x: torch.Tensor) -> Any:
        if self.checkpointing == "none" or not self.training:
            return layer(x)
        return checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")


def loss_of(net: Net, tokens: torch.Tensor) -> torch.Tensor:
    """Of the next token, with the side losses, by whoever adds them up."""
    logits, side = parts(net(tokens))
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())
    if net.own.side == "none":
        return loss
    if net.own.summed == "root":
        return loss + 0.3 * side
    sides = net.sides if net.own.summed == "list" else [layer.side for layer in net.layers]
    return loss + 0.3 * sum(sides)
