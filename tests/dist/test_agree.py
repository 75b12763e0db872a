"""Ranks that were given different things are told so, all of them, before any waits for another."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowband
from lowband.errors import UserError
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme

SAME = {
    "seed": 1, "weights": "world", "wrap": nn.Linear, "dtype": torch.float32, "inner": {}, "width": 8,
    "device": None,
}  # fmt: skip


def told(on_rank_1: dict[str, object]) -> str:
    """What sharding says, where rank 1 is given something else."""
    mine = {**SAME, **(on_rank_1 if dist.get_rank() == 1 else {})}
    torch.manual_seed(mine["seed"])
    module = nn.Sequential(nn.Linear(8, mine["width"]), nn.ReLU(), nn.Linear(mine["width"], 8))
    scheme = Scheme.parse({"name": "x", "weights": mine["weights"], "grads": "world", "optim": "world"}, "x")
    try:
        topology = lowband.Topology(mine["inner"])
        lowband.shard(module, scheme, topology, mine["wrap"], mine["dtype"], device=mine["device"])
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("on_rank_1", "what"),
    [
        ({"seed": 2}, "sum of initial weights"),
        ({"weights": "self"}, "weights in its scheme"),
        ({"wrap": nn.Sequential}, "division into units"),
        ({"dtype": torch.bfloat16}, "compute_dtype"),
        ({"inner": {"node": 2}}, "sizes of levels"),
        ({"width": 16}, "list of parameters"),
    ],
)
def test_a_rank_that_differs_is_named(on_rank_1: dict[str, object], what: str) -> None:
    words = on_ranks(2, told, on_rank_1, time_limit_s=60)
    assert words[0] == words[1]
    assert words[0].startswith("rank 1 on ")
    assert f"differs from rank 0 in {what}" in words[0]


def test_ranks_that_agree_go_on() -> None:
    assert on_ranks(2, told, {}, time_limit_s=60) == ["", ""]


def test_a_device_that_one_rank_refuses_ends_them_all() -> None:
    """The other rank names the cause, too, and does not wait for one that is gone."""
    first, last = on_ranks(2, told, {"device": "cuda:1"}, time_limit_s=60)
    assert first == last
    assert "device is 'cuda:1' (allowed: cpu, where the module has values" in first
