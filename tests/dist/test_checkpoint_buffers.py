"""Buffers that differ between ranks: said where none should, and where one of them is saved for all."""

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


def warned(axes: Axes, is_own: bool, is_kept: bool, folder: str) -> tuple[list[str], list[str]]:
    """Of buffers, by lowband.shard and by a save."""
    topology = lowband.Topology({}, axes)
    torch.manual_seed(0)
    module = Marked(float(dist.get_rank() if is_own else 7), is_kept)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        lowband.shard(module, "zero3", topology, lambda _: False, torch.float32)
        optimizer, checkpointer = torch.optim.SGD(module.parameters()), lowband.Checkpointer(folder)
        checkpointer.save(0, module, optimizer)
    checkpointer.wait()
    texts = [str(each.message) for each in told]
    return [text for text in texts if text.startswith(SHARD)], [
        text for text in texts if text.startswith(SAVE)
    ]


SHARD = "buffer 'mark' of rank 1 differs from that of rank 0"
SAVE = "a checkpoint has one 'buffer.mark', rank 0's, and rank 1's is another"


@pytest.mark.parametrize(
    ("axes", "is_own", "is_kept", "at_shard", "at_save"),
    [
        (Axes(context=2), True, True, 0, 1),
        (Axes(context=2), False, True, 0, 0),
        (Axes(context=2), True, False, 0, 0),
        (Axes(), True, True, 1, 0),  # a save has the first rank's, as under DDP
        (Axes(), True, False, 1, 0),
        (Axes(), False, True, 0, 0),
    ],
)
def test_a_buffer_of_a_ranks_own(
    tmp_path: Path, axes: Axes, is_own: bool, is_kept: bool, at_shard: int, at_save: int
) -> None:
    first, second = on_ranks(2, warned, axes, is_own, is_kept, str(tmp_path))
    assert tuple(map(len, first)) == (at_shard, at_save)
    assert second == ([], [])
