"""Rates with neighbours on a slow level, whatever their number."""

import pytest
import torch

import lowband
from lowband.engine.transport.meeting import Meeting
from lowband.preflight.links import pair_rates
from lowband.run.on_ranks import on_ranks


def partners() -> list[int]:
    axis, meeting = lowband.Topology({}).along("data"), Meeting(60)
    return [pair.partner for pair in pair_rates(axis, "world", 1e6, torch.device("cpu"), meeting)]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5])
def test_each_rank_is_timed_with_its_neighbours_in_the_ring(ranks: int) -> None:
    for rank, found in enumerate(on_ranks(ranks, partners)):
        assert sorted(found) == sorted({(rank + 1) % ranks, (rank - 1) % ranks} - {rank})
