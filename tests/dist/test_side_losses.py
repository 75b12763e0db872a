"""Losses that do not go through a unit's output alone: right, bit by bit, whatever the scheme."""

from functools import cache

import pytest
import reference
import torch
import torch.distributed as dist
from modules import INNER, inputs
from side_losses import CHAINED, PROGRAMS, Block
from test_parity import CONFIG

import lowband
from lowband.engine.api import engine_of
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels

RANKS, STEPS, MICRO_BATCHES = 4, 2, 2
SCHEMES = ("zero1", "zero2", "zero3", "hpz", "hsdp", "hier3-exact", "ddp")
WAYS = ("overlap", "overlap, again", "no overlap")

State = dict[str, torch.Tensor]


def sgd(parameters) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def batch_of(step: int, micro: int, rank: int) -> torch.Tensor:
    return inputs(10 * step + micro, rank)


def expected(scheme: str) -> dict[str, State]:
    levels, no_clip = Levels.fit(INNER, RANKS), float("inf")
    found = {}
    for name, (make, loss_of) in PROGRAMS.items():
        *_, found[name] = reference.train(
            make(), loss_of, lambda *place: (batch_of(*place),), CONFIG.scheme(scheme), levels, STEPS,
            MICRO_BATCHES, no_clip, sgd,
        )  # fmt: skip
    return found


def sharded(name: str, scheme: str, topology: lowband.Topology, overlap: bool = True) -> torch.nn.Module:
    make, _ = PROGRAMS[name]
    return lowband.shard(
        make(), CONFIG.scheme(scheme), topology, Block, compute_dtype=torch.float32, overlap=overlap
    )


def train(name: str, scheme: str, topology: lowband.Topology, overlap: bool, breadth: bool = False) -> State:
    model = sharded(name, scheme, topology, overlap)
    optimizer, (_, loss_of) = sgd(model.parameters()), PROGRAMS[name]

    def part_of_loss(x: torch.Tensor) -> torch.Tensor:
        return loss_of(model, x) / MICRO_BATCHES

    for step in range(STEPS):
        parts = [batch_of(step, i, dist.get_rank()) for i in range(MICRO_BATCHES)]
        if breadth:
            lowband.accumulate(model, parts, part_of_loss)
        else:
            engine_of(model).sync = False
            for i, part in enumerate(parts):
                engine_of(model).sync = i == MICRO_BATCHES - 1
                part_of_loss(part).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not any(engine_of(model).meter.now[kind] for kind in ("gathered", "sums"))
    return lowband.full_state_dict(model)


def train_all(scheme: str) -> dict[str, list[State]]:
    topology = lowband.Topology(INNER)
    found = {name: [train(name, scheme, topology, way != WAYS[2]) for way in WAYS] for name in PROGRAMS}
    for name in CHAINED:
        found[f"{name}, breadth-first"] = [train(name, scheme, topology, way != WAYS[2], True) for way in WAYS]
    return found


@cache
def trained(scheme: str) -> dict[str, list[State]]:
    return on_ranks(RANKS, train_all, scheme)[0]


@cache
def single(scheme: str) -> dict[str, State]:
    return on_ranks(1, expected, scheme)[0]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_bit_equal_to_a_single_process(scheme: str) -> None:
    for name, want in single(scheme).items():
        for way, got in zip(WAYS, trained(scheme)[name], strict=True):
            wrong = [key for key, value in want.items() if not torch.equal(got[key], value)]
            assert not wrong, (name, way, wrong)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_breadth_first_too(scheme: str) -> None:
    """Up to the order of sums; with and without overlap the same bits."""
    for name in CHAINED:
        first, *others = trained(scheme)[f"{name}, breadth-first"]
        for key, value in single(scheme)[name].items():
            assert torch.allclose(first[key], value, rtol=1e-5, atol=1e-6), (name, key)
            assert all(torch.equal(first[key], other[key]) for other in others), (name, key)
