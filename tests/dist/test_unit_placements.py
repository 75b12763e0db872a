"""Units with placements of their own: bits, bytes, norms, checkpoints and the shards' whole parameters."""

from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lowband
from lowband.cost.bytes import transfers
from lowband.engine.passes.engine import engine_of
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from lowband.spec.scheme import Scheme
from tests.refused import answer

INNER = {"package": 2, "node": 4}
WIDE = Scheme(name="wide", weights="world", grads="world", optim="world")
NEAR = Scheme(name="near", weights="node", grads="node", optim="node")
LAYERED = Scheme(name="layered", weights="package", grads="node", optim="world")
SEQUENCES, STEPS = 16, 3


class Tower(nn.Module):
    """Odd sizes on purpose."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(6, 11)
        self.layers = nn.ModuleList(nn.Linear(11, 11) for _ in range(4))
        self.last = nn.Linear(11, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.last(x).square().mean()


def mixed(unit: str, _owner: nn.Module) -> Scheme | None:
    return {"layers.0": NEAR, "layers.1": LAYERED, "root": NEAR}.get(unit)


def is_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.in_features == module.out_features


def sharded(placement_of=mixed) -> nn.Module:
    return lowband.shard(
        Tower(), WIDE, lowband.Topology(INNER), is_layer, torch.float32, placement_of=placement_of
    )


def data(step: int) -> torch.Tensor:
    each = SEQUENCES // dist.get_world_size()
    whole = torch.randn(SEQUENCES, 6, generator=torch.Generator().manual_seed(step))
    return whole[dist.get_rank() * each :][:each]


def train(model: nn.Module, steps: range, optimizer: torch.optim.Optimizer) -> list[float]:
    norms = []
    for step in steps:
        model(data(step)).backward()
        norms.append(float(lowband.clip_grad_norm_(model, 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def trained(placement_of) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = sharded(placement_of)
    norms = train(model, range(STEPS), torch.optim.AdamW(model.parameters(), lr=1e-2))
    return norms, lowband.full_state_dict(model)


@cache
def with_one_placement(ranks: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    return on_ranks(ranks, trained, None)[0]


@pytest.mark.parametrize("ranks", [1, 2, 4, pytest.param(8, marks=pytest.mark.wide)])
def test_trains_as_one_placement_does(ranks: int) -> None:
    """Sums go through the same hops in the same order, whatever is kept where."""
    norms, weights = on_ranks(ranks, trained, mixed)[0]
    expected_norms, expected = with_one_placement(ranks)
    assert norms == pytest.approx(expected_norms, rel=1e-12)
    assert weights.keys() == expected.keys() == Tower().state_dict().keys()
    for name in expected:
        assert torch.equal(weights[name], expected[name]), name


def sent() -> tuple[Counter, list[tuple[str, int]]]:
    model = sharded()
    engine = engine_of(model)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        engine.ledger.take()
        model(data(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    counted = Counter({(s.level, s.collective): s.bytes for s in engine.ledger.take()})
    return counted, [(unit.name, unit.layout.numel) for unit in engine.units]


def test_bytes_are_the_sum_of_each_units_closed_form() -> None:
    counted, units = on_ranks(8, sent)[0]
    expected: Counter = Counter()
    for name, numel in units:
        scheme = mixed(name, nn.Identity()) or WIDE
        for t in transfers(numel, name == "root", scheme, Levels.fit(INNER, 8), "fp32", "fp32"):
            expected[t.hop.level, t.collective.name] += t.sent_bytes
    assert len(expected) > 4
    assert counted == expected


def resumed(folder: Path) -> dict[str, torch.Tensor]:
    """Two steps under mixed placements, saved; a third after loading under one placement."""
    model = sharded()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, range(2), optimizer)
    saver = lowband.Checkpointer(folder)
    saver.save(2, model, optimizer)
    saver.wait()
    again = sharded(None)
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    assert saver.load_newest(again, optimizer) is not None
    train(again, range(2, STEPS), optimizer)
    return lowband.full_state_dict(again)


def test_checkpoints_cross_placements(tmp_path: Path) -> None:
    weights = on_ranks(8, resumed, tmp_path)[0]
    _, expected = with_one_placement(8)
    for name in expected:
        assert torch.equal(weights[name], expected[name]), name


def pieces() -> list[tuple]:
    model = sharded()
    found = []
    for name, p in model.named_parameters():
        of = p.shard_of
        own = p.detach().as_subclass(torch.Tensor)[: of.stop - of.start]
        found.append((name, of.name, tuple(of.shape), of.start, of.stop, of.ranks, own.tolist()))
    return found


def test_shards_know_their_whole() -> None:
    whole = dict(Tower().named_parameters())
    by_rank = on_ranks(8, pieces)
    for place, (name, *_) in enumerate(by_rank[0]):
        for rank in range(8):
            found, of_name, shape, _, _, ranks, _ = by_rank[rank][place]
            assert found == of_name == name
            assert shape == whole[name].shape
            assert rank in ranks
            put_together = []
            for holder in ranks:
                *_, start, stop, _, values = by_rank[holder][place]
                assert start == len(put_together)
                assert stop - start == len(values)
                put_together += values
            assert put_together == whole[name].flatten().tolist()


def differing() -> str:
    own = LAYERED if dist.get_rank() == 1 else NEAR
    return answer(lambda: sharded(lambda unit, _: own if unit == "layers.2" else None))


def test_ranks_must_place_alike() -> None:
    assert all("with their own placement" in text for text in on_ranks(4, differing))
