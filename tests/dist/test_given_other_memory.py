"""Parameters that are given other memory after `lowband.shard`, or share some before: refused on every rank,
also on one that holds nothing of them.
"""

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from modules import Tower, inputs, is_layer
from torch import nn
from torch.nn.utils import parametrizations

import lowband
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme
from tests.refused import answer

ZERO3 = Scheme(name="zero3", weights="world", grads="world", optim="world")


def sharded(module: nn.Module) -> nn.Module:
    return lowband.shard(module, ZERO3, lowband.Topology({}), is_layer, compute_dtype=torch.float32)


def bias_cast() -> None:
    """The last bias of a layer is the last rank's, and others hold nothing of it."""
    model = sharded(Tower())
    model.layers[0][2].bias.data = model.layers[0][2].bias.data.double()
    model(inputs(0, dist.get_rank()))


def assigned_through_a_parametrization() -> None:
    model = Tower()
    parametrizations.weight_norm(model.first)
    sharded(model).first.weight = torch.ones(7, 5)


def set_to_others() -> None:
    with torch.no_grad():
        sharded(Tower()).first.bias.set_(torch.ones(7))


def laid_out_for_channels() -> None:
    model = sharded(nn.Sequential(nn.Conv2d(2, 3, 1), nn.Conv2d(3, 2, 1)))
    model.to(memory_format=torch.channels_last)


class Two(nn.Module):
    def __init__(self, first: torch.Tensor, second: torch.Tensor) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(first), nn.Parameter(second)


def overlapping() -> None:
    values = torch.ones(10)
    sharded(Two(values[:5], values[3:8]))


def apart_in_one_memory() -> None:
    values = torch.arange(12.0).view(4, 3)
    state = lowband.full_state_dict(sharded(Two(values[:, :1], values[:, 1:])))
    if dist.get_rank() == 0:
        assert torch.equal(state["first"], values[:, :1]) and torch.equal(state["second"], values[:, 1:])


SAID: dict[Callable[[], None], str] = {
    bias_cast: "parameters of 'layers.0' were moved or cast after lowband.shard",
    assigned_through_a_parametrization: "first.parametrizations.weight.original0: set_ of a shard",
    set_to_others: "first.bias: set_ of a shard would take it out of its unit (allowed: p.copy_(values)",
    laid_out_for_channels: "0.weight: a shard is 1D, and has no torch.channels_last",
    overlapping: "Two: 'second' shares its memory with 'first', and each would be trained alone",
    apart_in_one_memory: "",
}


def answers() -> list[str]:
    return [answer(case) for case in SAID]


@pytest.mark.parametrize("ranks", [1, 2])
def test_refused_on_every_rank(ranks: int) -> None:
    for said in on_ranks(ranks, answers):
        for text, expected in zip(said, SAID.values(), strict=True):
            assert text.startswith(expected)
            assert bool(text) == bool(expected)
