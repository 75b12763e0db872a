"""Single-device training that the engine must reproduce: plain torch, no process group.

Gradients of the ranks' micro-batches are computed one after the other and summed in the order in which a
scheme's hops sum them: partners of the innermost level first, in order. With the same order of sums the
engine must give the same bits.
"""

from collections.abc import Callable, Sequence

import torch
from torch import nn

from lowband.spec.mesh import SELF, WORLD, Levels
from lowband.spec.scheme import Scheme

Batches = Callable[[int, int, int], tuple[torch.Tensor, ...]]  # step, micro-batch, rank -> arguments


def sum_over(parts: Sequence[torch.Tensor], levels: Levels, inner: str, outer: str) -> list[torch.Tensor]:
    """By rank: the sum over the ranks between two levels, hop by hop."""
    totals = list(parts)
    for hop in levels.hops(inner, outer):
        before = totals
        totals = []
        for rank in range(levels.world):
            first, *others = hop.partners(rank)
            total = before[first].clone()
            for other in others:
                total += before[other]
            totals.append(total)
    return totals


def train(
    model: nn.Module,
    loss_of: Callable[..., torch.Tensor],
    batches: Batches,
    scheme: Scheme,
    levels: Levels,
    steps: int,
    accumulation: int,
    clip: float,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses (mean over ranks), gradient norms and final parameters."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer(parameters)
    losses, norms = [], []
    for step in range(steps):
        at_grads: list[list[torch.Tensor]] = []  # by parameter, by rank
        loss_sum = 0.0
        for micro in range(accumulation):
            by_rank = []
            for rank in range(levels.world):
                loss = loss_of(model, *batches(step, micro, rank)) / accumulation
                grads = torch.autograd.grad(loss, parameters, allow_unused=True)
                by_rank.append(
                    [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]
                )
                loss_sum += loss.item()
            reduced = [sum_over(parts, levels, SELF, scheme.grads) for parts in zip(*by_rank, strict=True)]
            if not at_grads:
                at_grads = [[part.clone() for part in parts] for parts in reduced]
            else:
                for totals, parts in zip(at_grads, reduced, strict=True):
                    for total, part in zip(totals, parts, strict=True):
                        total += part
        for parameter, parts in zip(parameters, at_grads, strict=True):
            parameter.grad = sum_over(parts, levels, scheme.grads, WORLD)[0] / levels.world
        norm = sum(p.grad.double().square().sum() for p in parameters).item() ** 0.5
        if norm > clip:
            for parameter in parameters:
                parameter.grad.mul_(clip / norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss_sum / levels.world)
        norms.append(norm)
    return losses, norms, {name: p.detach().clone() for name, p in model.named_parameters()}
