"""Random states come back to ranks that lie along the same axes; others go on with their program's seeds."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import dropout

import lowband
from lowband import Column, Row
from lowband.run.on_ranks import on_ranks
from lowband.spec.axes import Axes


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + dropout(self.down(torch.tanh(self.up(x))), 0.2, self.training)


def made(axes: Axes) -> tuple[nn.Module, torch.optim.Optimizer]:
    """With a seed for each rank along data."""
    topology = lowband.Topology({}, axes)
    torch.manual_seed(0)
    module = Dropping()
    if axes.tensor > 1:
        lowband.parallelize(module, {"up": Column(), "down": Row()}, topology)
    lowband.shard(module, "zero3", topology, lambda _: False, torch.float32)
    torch.manual_seed(5 + topology.along("data").place)
    return module, torch.optim.SGD(module.parameters(), lr=0.1)


def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    module(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def masks_after(saved: Axes, loaded: Axes, folder: str) -> tuple[list[list[float]], list[float], list[float]]:
    """What each rank draws after a load and a step; what this one drew after the save and the same step; and
    what it draws behind its seed."""
    module, optimizer = made(saved)
    step(module, optimizer)
    checkpointer = lowband.Checkpointer(folder)
    checkpointer.save(1, module, optimizer)
    checkpointer.wait()
    step(module, optimizer)
    went_on = torch.rand(4).tolist()
    module, optimizer = made(loaded)
    behind_the_seed = torch.rand(4).tolist()
    module, optimizer = made(loaded)
    checkpointer.load_newest(module, optimizer)
    if saved != loaded:
        drawn = torch.rand(4).tolist()
    step(module, optimizer)
    if saved == loaded:
        drawn = torch.rand(4).tolist()
    everyones: list[list[float]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyones, drawn)
    return everyones, went_on, behind_the_seed


DATA, TENSOR = Axes(), Axes(tensor=2)


@pytest.mark.parametrize("axes", [DATA, TENSOR], ids=lambda axes: axes.beside)
def test_they_come_back_along_the_same_axes(tmp_path: Path, axes: Axes) -> None:
    for rank, (drawn, went_on, _) in enumerate(on_ranks(2, masks_after, axes, axes, str(tmp_path))):
        assert drawn[rank] == went_on


@pytest.mark.parametrize(("saved", "loaded"), [(DATA, TENSOR), (TENSOR, DATA)], ids=lambda axes: axes.beside)
def test_along_others_the_seeds_of_the_program_hold(tmp_path: Path, saved: Axes, loaded: Axes) -> None:
    for rank, (drawn, _, behind_the_seed) in enumerate(
        on_ranks(2, masks_after, saved, loaded, str(tmp_path))
    ):
        assert drawn[rank] == behind_the_seed
        assert (drawn[0] == drawn[1]) == (loaded.tensor > 1)
