"""A unit's leaves between two gathers: which buffer the next one fills, and what others see meanwhile."""

import pytest
import torch
from torch import nn

from lowband.engine.units.leaves import Leaves
from lowband.errors import UserError
from lowband.spec.partition import UnitLayout

SHAPES = [(2, 3), (5,)]


def gathered(leaves: Leaves, version: int) -> torch.Tensor:
    """The buffer of a gather whose values are all its version."""
    flat = leaves.buffer()
    leaves.fill(flat.fill_(version), version)
    return flat


@pytest.fixture
def leaves() -> Leaves:
    """After one gather, dropped."""
    layout = UnitLayout.of(SHAPES, 1)
    flat = torch.empty(layout.numel)
    made = Leaves("unit", [nn.Parameter(torch.zeros(shape)) for shape in SHAPES], layout, flat)
    flat.untyped_storage().resize_(0)
    del flat
    gathered(made, 1)
    made.empty(is_full=True)
    return made


def test_a_buffer_that_nobody_else_has_gets_memory_again(leaves: Leaves) -> None:
    before = leaves.flat
    assert before.untyped_storage().nbytes() == 0
    with pytest.raises(UserError, match="dropped after its unit's forward"):
        leaves.leaves[0].sum()
    assert gathered(leaves, 2) is before
    assert [leaf.sum().item() for leaf in leaves.leaves] == [12, 10]
    assert not leaves.are_changed()
    assert not leaves.kept


def test_a_view_that_somebody_keeps_stays_and_shows_new_values(leaves: Leaves) -> None:
    before = gathered(leaves, 2)
    view = leaves.leaves[1].detach()[1:]
    leaves.empty(is_full=True)
    assert gathered(leaves, 3) is not before
    assert view.tolist() == [3, 3, 3, 3]
    del view, before
    leaves.empty(is_full=True)
    gathered(leaves, 4)
    assert not leaves.kept


def test_a_buffer_that_was_never_full_is_left_to_messages_that_may_still_arrive(leaves: Leaves) -> None:
    filling = leaves.buffer()
    leaves.empty(is_full=False)
    assert filling.untyped_storage().nbytes() == filling.nbytes
    assert not leaves.kept
    assert gathered(leaves, 2) is not filling
    filling.fill_(7)
    assert leaves.leaves[1].tolist() == [2] * 5
