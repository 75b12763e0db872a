"""Chains for the tests of `lowband.Pipeline`, and the same training in plain torch on one device."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from reference import sum_over
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowband
from lowband.engine.api import engine_of
from lowband.spec.axes import Axes
from lowband.spec.mesh import SELF, WORLD, Levels

B, S, D = 2, 5, 8  # sequences, tokens, width
STEPS, CLIP = 2, 0.01


class Layer(nn.Module):
    """Pre-norm, residual, with a weight that no `F.linear` uses; perhaps with dropout and checkpointing."""

    def __init__(self, dropout: float = 0.0, recomputes: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 2 * D), nn.Linear(2 * D, D, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1, D))
        self.dropout, self.recomputes = nn.Dropout(dropout), recomputes

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.dropout(torch.tanh(self.up(self.norm(x)))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self.branch, x, use_reentrant=False) if self.recomputes else self.branch(x)
        return x + y * self.scale


def chain(
    layers: int, dropout: float = 0.0, recomputes: bool = False, dtype: torch.dtype = torch.float32
) -> list[nn.Module]:
    """An embedding of tokens, layers, and a head: layers + 2 modules."""
    torch.manual_seed(1)
    inner = [Layer(dropout, recomputes) for _ in range(layers)]
    modules = [nn.Embedding(11, D), *inner, nn.Sequential(nn.LayerNorm(D), nn.Linear(D, 11))]
    return [module.to(dtype) for module in modules]


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches(step: int, rank: int, micro_batches: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of a rank along data."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [tuple(torch.randint(11, (2, B, S), generator=generator)) for _ in range(micro_batches)]


class Trained(NamedTuple):
    """losses: by step, of all micro-batches; norms: by step; state: of this rank's stages; sent: by row"""

    losses: list[list[float]]
    norms: list[float]
    state: dict[str, torch.Tensor]
    sent: dict[str, int]


def train(pipe: lowband.Pipeline, data: int, micro_batches: int, steps: int = STEPS) -> Trained:
    """data: this rank's place along the data axis"""
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(steps):
        losses.append([float(loss) for loss in pipe.step(batches(step, data, micro_batches))])
        norms.append(float(lowband.clip_grad_norm_(pipe, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    sent: dict[str, int] = {}
    for row in engine_of(pipe).ledger.take():
        sent[row.collective] = sent.get(row.collective, 0) + row.bytes
    return Trained(losses, norms, lowband.full_state_dict(pipe), sent)


def on_axes(
    inner: dict[str, int],
    ranks: int,
    scheme,
    micro_batches: int,
    modules: Callable[[], list[nn.Module]],
    **options,
) -> Trained:
    """ranks: along the pipeline axis"""
    topology = lowband.Topology(inner, Axes(pipeline=ranks))
    pipe = lowband.Pipeline(
        modules(), loss_of, scheme, topology, micro_batches, compute_dtype=torch.float32, **options
    )
    return train(pipe, topology.along("data").place, micro_batches)


def alone(
    modules: Callable[[], list[nn.Module]],
    micro_batches: int,
    levels: Levels,
    copied: Sequence[Sequence[nn.Parameter]] = (),
) -> Trained:
    """The same in one process: each rank's micro-batches in turn, then a sum over data in the hops' order.

    copied: parameters that are copies of one; their gradients are then summed, from the last one of the chain
            to the first, as a backward comes to them
    """
    model = nn.Sequential(*modules())
    parameters = [p for p in model.parameters() if p.requires_grad]
    others = {id(p) for copies in copied for p in copies[1:]}
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        by_rank = []
        for rank in range(levels.world):
            optimizer.zero_grad()
            of_rank = []
            for tokens, targets in batches(step, rank, micro_batches):
                loss = loss_of(model(tokens), targets)
                loss.backward()
                of_rank.append(loss.item())
            losses.append(of_rank)
            by_rank.append([p.grad for p in parameters])
        for p, grads in zip(parameters, zip(*by_rank, strict=True), strict=True):
            p.grad = sum_over(grads, levels, SELF, WORLD)[0] / levels.world
        for copies in copied:
            *rest, total = (p.grad for p in copies)
            for grad in reversed(rest):
                total = total + grad
            for p in copies:
                p.grad = total.clone()
        squares = [p.grad.double().square().sum() for p in parameters if id(p) not in others]
        norms.append(sum(squares).sqrt().item())
        assert norms[-1] > CLIP
        for p in parameters:
            p.grad *= CLIP / norms[-1]
        optimizer.step()
    return Trained(losses, norms, dict(model.state_dict()), {})


def plain(model: nn.Module, micro_batches: int) -> Trained:
    """The same in plain torch, which knows nothing of stages."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    losses, norms = [], []
    for step in range(STEPS):
        optimizer.zero_grad()
        each = [loss_of(model(x), y) for x, y in batches(step, 0, micro_batches)]
        for loss in each:
            loss.backward()
        losses.append([loss.item() for loss in each])
        norms.append(sum(p.grad.double().square().sum() for p in parameters).sqrt().item())
        for p in parameters:
            p.grad *= CLIP / norms[-1]
        optimizer.step()
    return Trained(losses, norms, dict(model.state_dict()), {})


def whole(found: Sequence[Trained]) -> dict[str, torch.Tensor]:
    """The whole model's state, from all ranks'. Each entry is on one of them."""
    assert sum(len(one.state) for one in found) == len(dict.fromkeys(k for one in found for k in one.state))
    return {key: value for one in found for key, value in one.state.items()}
