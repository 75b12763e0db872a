"""Param groups by kind of layer, where a stage of a pipeline has no layers of some group."""

import warnings

import pytest
import torch
from staged import batches, chain, loss_of
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks
from lowband.spec.axes import Axes

MICRO_BATCHES, STEPS = 2, 2


def grouped(module: nn.Module, decays: tuple[float, float]) -> torch.optim.Optimizer:
    """An embedding's and all others'."""
    named = list(module.named_parameters())
    first = [parameter for name, parameter in named if name.startswith("0.")]
    rest = [parameter for name, parameter in named if not name.startswith("0.")]
    return torch.optim.AdamW(
        [
            {"params": first, "lr": 1e-3, "weight_decay": decays[0]},
            {"params": rest, "lr": 1e-2, "weight_decay": decays[1]},
        ]
    )


def in_stages(decays: tuple[float, float]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """This rank's weights, and what was warned of."""
    ranks = torch.distributed.get_world_size()
    topology = lowband.Topology({}, Axes(pipeline=ranks))
    pipe = lowband.Pipeline(chain(3), loss_of, "zero3", topology, MICRO_BATCHES, compute_dtype=torch.float32)
    optimizer = grouped(pipe, decays)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(STEPS):
            pipe.step(batches(step, 0, MICRO_BATCHES))
            optimizer.step()
            optimizer.zero_grad()
    state = lowband.full_state_dict(pipe)
    return state, [str(each.message) for each in told if "param group" in str(each.message)]


def as_one(decays: tuple[float, float]) -> dict[str, torch.Tensor]:
    model = nn.Sequential(*chain(3))
    optimizer = grouped(model, decays)
    for step in range(STEPS):
        for inputs, targets in batches(step, 0, MICRO_BATCHES):
            loss_of(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("decays", [(0.01, 0.01), (0.2, 0.1)])
@pytest.mark.parametrize("ranks", [2, 4])
def test_trains_as_one_process(ranks: int, decays: tuple[float, float]) -> None:
    [expected] = on_ranks(1, as_one, decays)
    found = on_ranks(ranks, in_stages, decays)
    state = {name: value for of_rank, _ in found for name, value in of_rank.items()}
    for name, value in expected.items():
        assert torch.allclose(state[name], value, rtol=1e-5, atol=1e-6), name
    assert sum(len(told) for _, told in found) <= 1
