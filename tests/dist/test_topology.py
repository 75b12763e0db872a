"""A topology: the same levels on every rank, and collectives that are numbered."""

import os
import re
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

import lowband
from lowband.errors import UserError
from lowband.run.launch import run_local
from lowband.run.on_ranks import on_ranks
from lowband.run.ranks import Rank


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


def _on_a_part(shares_topology: bool, is_gone: bool, told: Path, rank: Rank) -> None:
    """Ranks 2 and 3 do not come, because they do other work or have ended; what 0 and 1 are told."""
    dist.init_process_group(
        "gloo", init_method=rank.init_method, rank=rank.rank, world_size=4, timeout=timedelta(seconds=10)
    )
    store = dist.distributed_c10d._get_default_store()

    def meet(where: str) -> None:  # no rank ends while another one still connects to it
        store.set(f"{where} {rank.rank}", "")
        store.wait([f"{where} {each}" for each in range(4)], timedelta(seconds=50))

    meet("joined")
    topology = lowband.Topology({"node": 2}) if shares_topology else None
    meet("built")
    if rank.rank >= 2:
        if not is_gone:
            store.wait(["told 0", "told 1"], timedelta(seconds=50))
        os._exit(0)
    with pytest.raises(UserError) as error:
        lowband.shard(nn.Linear(4, 4), "zero3", topology or lowband.Topology({"node": 2}), nn.Linear)
    (told / str(rank.rank)).write_text(str(error.value))
    store.set(f"told {rank.rank}", "")
    os._exit(0)  # see run.launch; the group is broken


@pytest.mark.parametrize("is_gone", [pytest.param(False, marks=pytest.mark.wide), True])
@pytest.mark.parametrize("shares_topology", [False, True])
def test_a_part_of_the_ranks_is_refused_by_name(tmp_path: Path, shares_topology: bool, is_gone: bool) -> None:
    run_local(4, partial(_on_a_part, shares_topology, is_gone, tmp_path), time_limit_s=60)
    for rank in range(2):
        found = re.fullmatch(
            "lowband.Topology, lowband.shard and the like: . of the job's 4 ranks have not made the same "
            r"call: (.*) \(allowed: calls by every rank of the job, in the same order\)",
            (tmp_path / str(rank)).read_text(),
        )
        assert found is not None
        # A connection that broke may be noticed before the other of both has come.
        assert found[1].split(", ") in (["2", "3"], [str(1 - rank), "2", "3"])
