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


class Replicas:
    """Models in one process, each trained as a replica of several ranks is."""

    def __init__(
        self,
        make_model: Callable[[], nn.Module],
        loss_of: Callable[..., torch.Tensor],
        batches: Batches,
        scheme: Scheme,
        levels: Levels,
        clip: float,
        make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self._loss_of, self._batches, self._clip = loss_of, batches, clip
        self.scheme, self.levels, self.size = scheme, levels, levels.size(scheme.sync.beyond)
        self._models = [make_model() for _ in range(levels.world // self.size)]
        self.trained = [list(model.parameters()) for model in self._models]
        self.names = [name for name, _ in self._models[0].named_parameters()]
        self._optimizers = [make_optimizer(parameters) for parameters in self.trained]

    def step(self, step: int) -> list[float]:
        """Each rank's loss; steps the optimizers."""
        at_step, by_rank, scheme, size = [], [], self.scheme, self.size
        for rank in range(self.levels.world):
            model, parameters = self._models[rank // size], self.trained[rank // size]
            loss = self._loss_of(model, *self._batches(step, 0, rank))
            by_rank.append(torch.autograd.grad(loss, parameters))
            at_step.append(loss.item())
        for i, parts in enumerate(zip(*by_rank, strict=True)):
            totals = sum_over(parts, self.levels, SELF, scheme.grads)
            totals = sum_over(totals, self.levels, scheme.grads, scheme.sync.beyond)
            for replica, parameters in enumerate(self.trained):
                parameters[i].grad = totals[replica * size] / size
        for parameters, optimizer in zip(self.trained, self._optimizers, strict=True):
            norm = sum(p.grad.double().square().sum() for p in parameters).item() ** 0.5
            if norm > self._clip:
                for parameter in parameters:
                    parameter.grad.mul_(self._clip / norm)
            optimizer.step()
        return at_step


def train_replicas(
    replicas: Replicas,
    steps: int,
    unit_of: Callable[[str], int] = lambda name: 0,
) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Replicas that meet every H steps: by step each rank's loss, and the weights agreed on last.

    Exchanges arrive `delay` steps after their start, when a part `mix` of a replica's own weights remains.
    unit_of: maps a parameter's name to its unit, which decides on its fragment
    """
    sync, levels = replicas.scheme.sync, replicas.levels
    trained, size = replicas.trained, replicas.size
    anchors = [p.detach().clone() for p in trained[0]]
    momenta = [torch.zeros_like(anchor) for anchor in anchors]
    arriving = {}  # step -> index of a parameter, and the update

    def start(i: int) -> torch.Tensor:
        """The update of a parameter, from the weights that the replicas have now."""
        moved = [anchors[i] - trained[rank // size][i].detach() for rank in range(levels.world)]
        mean = sum_over(moved, levels, sync.beyond, WORLD)[0] / len(trained)
        if sync.outer == "average":
            return mean
        momenta[i].mul_(sync.momentum).add_(mean)
        is_ahead = sync.outer == "nesterov"
        return sync.learning_rate * (mean + sync.momentum * momenta[i] if is_ahead else momenta[i])

    def arrive(step: int) -> None:
        for i, update in arriving.pop(step, []):
            anchors[i] -= update
            for parameters in trained:
                own = parameters[i].detach()
                mixed = sync.mix * own + (1 - sync.mix) * anchors[i] if sync.mix else anchors[i]
                parameters[i].data.copy_(mixed)

    losses = []
    for step in range(steps):
        losses.append(replicas.step(step))
        arrive(step)
        for i, name in enumerate(replicas.names):
            offset = (unit_of(name) % sync.fragments + 1) * sync.every // sync.fragments
            if step + 1 >= offset and (step + 1 - offset) % sync.every == 0:
                arriving.setdefault(step + sync.delay, []).append((i, start(i)))
        if not sync.delay:
            arrive(step)
    return losses, dict(zip(replicas.names, anchors, strict=True))


def train_partners(
    replicas: Replicas,
    steps: int,
    sources: Callable[[int, int], int],
) -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """Replicas that average with one other every H steps: by step each rank's loss, and the mean at the end.

    sources: from an exchange's number and a replica to the one that it receives from
    """
    sync, levels, trained = replicas.scheme.sync, replicas.levels, replicas.trained
    arriving = {}  # step -> by replica and parameter: what was received, and what was sent
    losses = []

    def arrive(step: int) -> None:
        for parameters, found in zip(trained, arriving.pop(step, [[]] * len(trained)), strict=True):
            for parameter, (received, sent) in zip(parameters, found, strict=bool(found)):
                own = parameter.detach()
                is_late = sync.delay > 0
                parameter.data.copy_((received - sent) * 0.5 + own if is_late else (received + own) * 0.5)

    for step in range(steps):
        losses.append(replicas.step(step))
        arrive(step)
        exchange, left = divmod(step + 1, sync.every)
        if not left:
            now = [[p.detach().clone() for p in parameters] for parameters in trained]
            arriving[step + sync.delay] = [
                list(zip(now[sources(exchange - 1, replica)], now[replica], strict=True))
                for replica in range(len(trained))
            ]
        if not sync.delay:
            arrive(step)
    means = []
    for weights in zip(*trained, strict=True):
        by_rank = [weights[rank // replicas.size].detach() for rank in range(levels.world)]
        means.append(sum_over(by_rank, levels, sync.beyond, WORLD)[0] / len(trained))
    return losses, dict(zip(replicas.names, means, strict=True))
