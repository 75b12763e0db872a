"""Reductions begin while a backward still computes, whether or not there are frozen units."""

from unittest.mock import patch

import pytest
import torch
from modules import inputs
from side_losses import Block, Net, added

import lowband
from lowband.engine.gradients import Gradients
from lowband.run.on_ranks import on_ranks


def reduced(is_frozen: bool, scheme: str) -> list[tuple[str, int]]:
    """Units in the order of their reductions, each with how many blocks had no gradient at its input yet."""
    model = Net(Block)
    if is_frozen:  # a frozen unit beside each block's own, as with adapters
        for block in model.blocks:
            block.up.requires_grad_(False)
    model = lowband.shard(model, scheme, lowband.Topology({}), Block, compute_dtype=torch.float32)
    left, found, reduce = set(model.blocks), [], Gradients.start_reduce

    def passed(block: torch.nn.Module, *_: object) -> None:
        left.discard(block)

    for block in model.blocks:
        block.register_full_backward_hook(passed)

    def note(grads: Gradients, at_boundary: bool) -> None:
        found.append((grads._unit.name, len(left)))
        reduce(grads, at_boundary)

    with patch.object(Gradients, "start_reduce", note):
        added(model, inputs(0, 0)).backward()
    return found


@pytest.mark.parametrize("scheme", ["zero3", "ddp"])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_block_is_reduced_before_the_next_one_is_through(is_frozen: bool, scheme: str) -> None:
    for found in on_ranks(2, reduced, is_frozen, scheme):
        names, left = zip(*found, strict=True)
        assert names == ("blocks.2", "blocks.1", "blocks.0", "root")
        assert left[0] >= 1
