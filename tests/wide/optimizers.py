"""A case's optimizer: on shards as users make it, and its counterpart on whole parameters.

An epsilon far above the rounding of gradients: where a gradient is zero but for rounding (a key's bias),
Adam's quotient would otherwise be rounding too. Rprop takes signs, so it is not drawn.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import lowband
from tests.wide.cases import Case

EPS = 1e-3

ELEMENTWISE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=EPS),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, eps=EPS, foreach=False),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01, eps=EPS),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01, eps=EPS),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01, eps=EPS),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.02, eps=EPS),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0, eps=EPS),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.005, eps=EPS, centered=True),
}


class WholeLamb(torch.optim.Optimizer):
    """arXiv 1904.00962, algorithm 2, of whole parameters in fp64."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state, (first, second) = self.state[p], group["betas"]
                whole, gradient = p.double(), p.grad.double()
                state["t"] = t = state.get("t", 0) + 1
                state["m"] = first * state.get("m", 0 * whole) + (1 - first) * gradient
                state["v"] = second * state.get("v", 0 * whole) + (1 - second) * gradient**2
                adam = state["m"] / (1 - first**t) / ((state["v"] / (1 - second**t)).sqrt() + group["eps"])
                update = adam + group["weight_decay"] * whole
                of_weights, of_update = whole.norm(), update.norm()
                trust = of_weights / of_update if of_weights > 0 and of_update > 0 else 1.0
                p.copy_(whole - group["lr"] * trust * update)


def whole_lamb(parameters: Any, **options: Any) -> torch.optim.Optimizer:
    return WholeLamb(parameters, {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, **options})


def optimizer_of(case: Case, parameters: Iterable[nn.Parameter], is_sharded: bool) -> torch.optim.Optimizer:
    trained = [p for p in parameters if p.requires_grad]
    given: Any = trained
    if case.decay_groups:
        given = [
            {"params": [p for p in trained if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
        ]
    if case.optimizer == "Lamb":
        return (lowband.Lamb if is_sharded else whole_lamb)(given, lr=0.02, eps=EPS)
    if case.optimizer == "Adafactor":
        return (lowband.Adafactor if is_sharded else torch.optim.Adafactor)(given, lr=0.02, eps=(EPS, EPS))
    return ELEMENTWISE[case.optimizer](given)


def schedule_of(case: Case, optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) if case.schedule else None
