"""The sample by which the engine notices writes through `.data`."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lowband.engine.units.changes import SAMPLES, Changes
from lowband.errors import UserError


def sampled(values: int) -> tuple[Changes, nn.Parameter]:
    shard = nn.Parameter(torch.zeros(values))
    changes = Changes("unit", shard.detach(), [shard])
    changes.take_sample()
    return changes, shard


# The place of the last value is no fp32 number: rounded up, it lay outside.
@pytest.mark.parametrize("values", [1, 2, SAMPLES, SAMPLES + 1, 2**24 + 4, 2**25 + 4])
def test_the_last_value_is_in_the_sample(values: int) -> None:
    changes, shard = sampled(values)
    changes.check_sample()
    shard.data[-1] += 1
    with pytest.raises(UserError, match="were written through"):
        changes.check_sample()


@given(st.integers(1, 10_000))
def test_samples_lie_inside_and_spread(values: int) -> None:
    places = sampled(values)[0]._places
    assert places is not None
    assert 0 <= int(places.min()) <= int(places.max()) == values - 1
    assert len(places.unique()) == min(values, SAMPLES)
