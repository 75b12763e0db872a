"""Reductions begin while a backward still computes, whether or not there are frozen units or buckets."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from modules import inputs
from side_losses import Block, Net, added
from torch import nn

import lowband
from lowband.engine.units.bucket import Bucket
from lowband.run.on_ranks import on_ranks
from lowband.spec import buckets


def reduced(is_frozen: bool, scheme: str, in_bucket: int) -> list[tuple[str, int]]:
    """Buckets in the order of their reductions, with how many blocks had no gradient at their input yet."""
    model = Net(Block)
    if is_frozen:  # a frozen unit beside each block's own, as with adapters
        for block in model.blocks:
            block.up.requires_grad_(False)
    numel = 4 * 512  # of a unit: its parameters, each at a multiple of 256, and of 2 ranks
    with patch.object(buckets, "BUCKET_NUMEL", in_bucket * numel):
        model = lowband.shard(model, scheme, lowband.Topology({}), Block, compute_dtype=torch.float32)
    left, found, reduce = set(model.blocks), [], Bucket.start_reduce

    def passed(block: torch.nn.Module, *_: object) -> None:
        left.discard(block)

    for block in model.blocks:
        block.register_full_backward_hook(passed)

    def note(bucket: Bucket, at_boundary: bool) -> None:
        found.append((bucket.name, len(left)))
        reduce(bucket, at_boundary)

    with patch.object(Bucket, "start_reduce", note):
        added(model, inputs(0, 0)).backward()
    return found


@pytest.mark.parametrize("scheme", ["zero3", "ddp"])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_block_is_reduced_before_the_next_one_is_through(is_frozen: bool, scheme: str) -> None:
    for found in on_ranks(2, reduced, is_frozen, scheme, 0):
        names, left = zip(*found, strict=True)
        assert names == ("blocks.2", "blocks.1", "blocks.0", "root")
        assert left[0] >= 1


def test_a_full_bucket_is_reduced_before_the_next_one_is_through() -> None:
    for found in on_ranks(2, reduced, False, "ddp", 2):
        names, left = zip(*found, strict=True)
        assert names == ("blocks.2 to blocks.1", "blocks.0 to root")
        assert left[0] >= 1


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(4, 4), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor, uses_gate: bool) -> torch.Tensor:
        h = torch.tanh(self.up(x))
        return x + (h * self.gate if uses_gate else h)


class Tower(nn.Module):
    """The last block's gate is used by rank 0 alone."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(Gated() for _ in range(4))

    def forward(self, rank: int) -> torch.Tensor:
        x = torch.randn(3, 4, generator=torch.Generator().manual_seed(rank))
        for block in self.blocks:
            x = block(x, uses_gate=rank == 0 or block is not self.blocks[-1])
        return x.square().mean()


def gates(scheme: str) -> dict[str, list[float]]:
    """Of each block, its gate's gradient, where this rank has it."""
    model = lowband.shard(Tower(), scheme, lowband.Topology({}), Gated, compute_dtype=torch.float32)
    model(dist.get_rank()).backward()
    found = {}
    for name, p in model.named_parameters():
        if "gate" in name and p.shard_of.stop > p.shard_of.start:
            found[name] = p.grad.as_subclass(torch.Tensor)[:1].tolist()
    return found


@pytest.mark.parametrize("scheme", ["ddp", "zero2", "zero3"])
def test_a_parameter_that_some_ranks_use_in_a_unit_before_others_is_averaged(scheme: str) -> None:
    """The next weights are gathered between: on every rank behind the same reductions."""
    plain = Tower()
    for rank in range(2):
        (plain(rank) / 2).backward()
    found = {}
    for of_rank in on_ranks(2, gates, scheme):
        found |= of_rank
    assert {name: [p.grad.item()] for name, p in plain.named_parameters() if "gate" in name} == {
        name: pytest.approx(value, rel=1e-6) for name, value in found.items()
    }
