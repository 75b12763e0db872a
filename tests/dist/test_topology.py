"""A topology: the same levels on every rank, and collectives that are numbered."""

import pytest
import torch.distributed as dist

import lowband
from lowband.errors import UserError
from lowband.run.on_ranks import on_ranks


def _others_levels() -> str:
    with pytest.raises(UserError) as error:
        lowband.Topology({"node": 1 + dist.get_rank()})
    return str(error.value)


def test_ranks_with_other_levels_are_refused_on_every_rank() -> None:
    for said in on_ranks(2, _others_levels):
        assert "rank 1 on " in said
        assert "differs from rank 0 in sizes of levels: {'node': 2}, not {'node': 1}" in said


def _numbers() -> list[int]:
    """Of submissions, which messages carry."""
    first, second = lowband.Topology({}), lowband.Topology({})
    return [topology.along("data").next_call() for topology in (first, first, second, first)]


def test_submissions_are_numbered_on_each_topology() -> None:
    assert on_ranks(2, _numbers) == [[0, 1, 0, 2]] * 2
