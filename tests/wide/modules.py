"""A case's module, its units, its batches and its loss: the same on ranks and in the plain process."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.wide import huggingface, own
from tests.wide.cases import Case

DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def module_of(case: Case, start: int = 0) -> nn.Module:
    """The same values for the same start."""
    torch.manual_seed(1000 * case.seed + start)
    module = own.Net(case) if case.own is not None else huggingface.module_of(case)
    trained = [p for p in module.parameters() if p.requires_grad]
    if case.frozen is not None:
        for number, parameter in enumerate(trained):
            parameter.requires_grad_(number % 3 != case.frozen)
    return module.train()


def is_unit(case: Case) -> Callable[[nn.Module], bool]:
    if case.wrap == "nothing":
        return lambda module: False
    block = own.Unit if case.own is not None else huggingface.FAMILIES[case.net].unit
    kinds = {"units": (block,), "linears": (nn.Linear,), "nested": (block, nn.Linear)}[case.wrap]
    return lambda module: isinstance(module, kinds)


def batch_of(case: Case, step: int, micro: int, rank: int) -> Any:
    draws = torch.Generator().manual_seed(case.seed * 100_000 + step * 1000 + micro * 100 + rank)
    if case.own is not None:
        return torch.randint(own.VOCABULARY, (2, own.LENGTH), generator=draws)
    return huggingface.FAMILIES[case.net].batch(draws)


def loss_of(module: nn.Module, case: Case, batch: Any) -> torch.Tensor:
    if isinstance(module, own.Net):
        return own.loss_of(module, batch)
    return huggingface.loss_of(module, case, batch)
