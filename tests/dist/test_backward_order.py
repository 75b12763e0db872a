"""Reductions begin while a backward still computes, whether or not there are frozen units or buckets."""

from unittest.mock import patch

import pytest
import torch
from modules import inputs
from side_losses import Block, Net, added

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
