"""A checkpoint has each buffer once: where ranks have their own, it says so."""

import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks
from lowband.spec.axes import Axes


class Marked(nn.Module):
    def __init__(self, mark: float, is_kept: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("mark", torch.tensor(mark), persistent=is_kept)


def warned(axes: Axes, is_own: bool, is_kept: bool, folder: str) -> list[str]:
    topology = lowband.Topology({}, axes)
    torch.manual_seed(0)
    module = Marked(float(dist.get_rank() if is_own else 7), is_kept)
    lowband.shard(module, "zero3", topology, lambda _: False, torch.float32)
    optimizer, checkpointer = torch.optim.SGD(module.parameters()), lowband.Checkpointer(folder)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        checkpointer.save(0, module, optimizer)
    checkpointer.wait()
    return [str(each.message) for each in told if "a checkpoint has one" in str(each.message)]


SAID = "a checkpoint has one 'buffer.mark', rank 0's, and rank 1's is another"


@pytest.mark.parametrize(
    ("axes", "is_own", "is_kept", "is_told"),
    [
        (Axes(context=2), True, True, True),
        (Axes(context=2), False, True, False),
        (Axes(context=2), True, False, False),
        (Axes(), True, True, False),  # as under DDP
    ],
)
def test_a_buffer_of_a_ranks_own(
    tmp_path: Path, axes: Axes, is_own: bool, is_kept: bool, is_told: bool
) -> None:
    first, second = on_ranks(2, warned, axes, is_own, is_kept, str(tmp_path))
    assert [text.startswith(SAID) for text in first] == [True] * is_told
    assert second == []
