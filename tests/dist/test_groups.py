"""Process groups of a topology: those that torch has made = closed form."""

import pytest
import torch.distributed as dist

import lowband
from lowband.cost.groups import process_groups
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels


def groups_of(inner: dict[str, int]) -> tuple[int, int, int]:
    """Groups made in the job, groups of this rank, and its connections to partners in them."""
    made, new_group = [], dist.new_group
    dist.new_group = lambda ranks, **options: (made.append(ranks), new_group(ranks, **options))[1]
    lowband.Topology(inner)
    mine = list(dist.distributed_c10d._world.pg_map)  # with the default group
    return 1 + len(made), len(mine), sum(group.size() - 1 for group in mine)


@pytest.mark.parametrize(
    ("ranks", "inner"),
    [(1, {}), (2, {"node": 2}), (4, {}), (6, {"package": 3}), (8, {"package": 2, "node": 4})],
)
def test_groups(ranks: int, inner: dict[str, int]) -> None:
    closed = process_groups(Levels.fit(inner, ranks), "gloo")
    assert on_ranks(ranks, groups_of, inner) == [tuple(closed)] * ranks


def test_frontier() -> None:
    """384 ranks in packages of 2 and nodes of 8: 192 pairs, 96 fours, 8 groups of 48."""
    levels = Levels.fit({"package": 2, "node": 8}, 384)
    assert process_groups(levels, "nccl") == (1 + 192 + 96 + 8, 4, 0)
    assert process_groups(levels, "gloo") == (1 + 2 * 296, 7, 2 * (1 + 3 + 47) + 383)
