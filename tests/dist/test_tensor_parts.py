"""Parts of a module that was cut along tensor, used apart from the whole or put together again."""

from collections.abc import Callable

import pytest
import torch
from near import assert_near
from torch import nn

import lowband
from lowband.engine.api import engine_of
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme
from lowband.spec.tensor import Column, Plan, Row, Tokens
from tests.refused import refusal

PLAN: Plan = {"*norm": Tokens(), "*up": Column(), "*down": Row()}
CLIP = 0.1


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def parts() -> nn.ModuleList:
    torch.manual_seed(1)
    return nn.ModuleList([Part(), Part(), Part()])


def _of_a_list(topology: lowband.Topology) -> nn.Module:
    """A list of the parts, which is not the module that was cut."""
    return nn.Sequential(*lowband.parallelize(parts(), PLAN, topology))


def _one_by_one(topology: lowband.Topology) -> nn.Module:
    return nn.Sequential(*(lowband.parallelize(part, PLAN, topology) for part in parts()))


def _stages(topology: lowband.Topology) -> nn.Module:
    whole = lowband.parallelize(parts(), PLAN, topology)
    return lowband.Pipeline(
        list(whole), lambda x, _: x.square().sum(), "zero3", topology, 1, "depth", compute_dtype=torch.float32
    )


def _trained(make: Callable[[lowband.Topology], nn.Module]) -> tuple[float, dict, dict[str, int]]:
    """Of one step: the norm, the weights, and the bytes sent by row."""
    topology = lowband.Topology({}, lowband.Axes(tensor=2, sequence_parallel=True))
    model, place = make(topology), topology.along("tensor").place
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(2))[:, 2 * place : 2 * place + 2]
    if isinstance(model, lowband.Pipeline):
        model.step([(x, None)])
    else:
        lowband.shard(model, "zero3", topology, Part, compute_dtype=torch.float32)
        model(x).square().sum().backward()
    norm = float(lowband.clip_grad_norm_(model, CLIP))
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    sent = {row.collective: row.bytes for row in engine_of(model).ledger.take()}
    return norm, lowband.full_state_dict(model), sent


def _alone() -> tuple[float, dict[str, torch.Tensor]]:
    model = nn.Sequential(*parts())
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(2))
    model(x).square().sum().backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP))
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return norm, model.state_dict()


@pytest.mark.parametrize("make", [_of_a_list, _one_by_one, _stages])
def test_parts_know_along_which_axis_they_were_cut(make: Callable[[lowband.Topology], nn.Module]) -> None:
    """Else norms would count slices as wholes, and shared gradients would stay partial sums."""
    (norm, found, sent), (other_norm, _, _) = on_ranks(2, _trained, make)
    [(expected_norm, expected)] = on_ranks(1, _alone)
    assert norm == other_norm == pytest.approx(expected_norm, rel=1e-6)
    assert_near(found, expected, rtol=1e-5, atol=1e-6)
    x = 2 * 4 * 8 * 4 // 2  # bytes that a rank sends of activations
    assert sent["enter_gather"] == sent["leave_scatter"] == 3 * x
    assert sent["shared_reduce"] == 3 * 3 * 8 * 4


def _refused() -> list[str]:
    topology = lowband.Topology({}, lowband.Axes(tensor=2, sequence_parallel=True))
    other = lowband.Topology({}, lowband.Axes(tensor=2, sequence_parallel=True))
    moved = nn.Linear(8, 8)
    moved.weight = lowband.parallelize(parts()[0], PLAN, topology).up.weight
    one, two = (lowband.parallelize(parts()[0], PLAN, each) for each in (topology, other))
    texts = []
    for module in (
        moved,
        nn.Sequential(lowband.parallelize(parts()[0], PLAN, topology), nn.Linear(8, 8)),
        nn.Sequential(one, two),
    ):
        texts.append(refusal(lowband.shard, module, "zero3", topology, Part))
    whole = dict.fromkeys(("weights", "grads", "optim"), "world")
    coarse = Scheme(name="coarse", **whole, grad_reduce="int8", block_size=1024)
    cut = lowband.parallelize(parts()[0], PLAN, topology)
    texts.append(refusal(lowband.shard, cut, coarse, topology, Part))
    return [*texts, refusal(lambda: lowband.parallelize(nn.Sequential(one), {"0.up": Column()}, topology))]


def test_what_cannot_be_known_of_parts_is_refused() -> None:
    for moved, beside, axes, blocks, twice in on_ranks(2, _refused):
        assert "'weight' belongs to a module that was cut along tensor, and not to this one" in moved
        assert "no rule says whether '1.weight' sees all tokens" in beside
        assert "parts were cut along different tensor axes" in axes
        assert "scheme 'coarse': block_size 1024 beside slices of a tensor axis (allowed: divisors" in blocks
        assert "already sharded or cut" in twice
