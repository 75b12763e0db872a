"""Breadth-first accumulation with everything else that a program does, between its steps and beside it."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from chains import MICRO_BATCHES, RANKS, Chain, accumulated, micro, sharded, train, weights
from modules import HIER3, INNER, Tower, is_layer
from torch import nn

import lowband
from lowband.engine.passes.engine import engine_of
from lowband.run.on_ranks import on_ranks


class Bomb(torch.autograd.Function):
    """Passes through; raises in forward or backward when it is armed."""

    armed = ""

    @staticmethod
    def forward(ctx, x):
        Bomb.blow("forward")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        Bomb.blow("backward")
        return grad

    @staticmethod
    def blow(where: str) -> None:
        if Bomb.armed == where:
            raise ArithmeticError(where)


class Mined(Chain):
    """Raises inside of its second layer, if `Bomb` is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1][1].register_forward_hook(lambda _module, _args, out: Bomb.apply(out))


def interrupted(model: nn.Module) -> None:
    """In every phase; the gradients of the failed calls are cleared, as after any failed backward."""
    before = threading.active_count()
    for armed in ("forward", "backward"):
        Bomb.armed = armed
        with pytest.raises(ArithmeticError):
            accumulated(model, 7)
        Bomb.armed = ""
    with pytest.raises(KeyError):
        lowband.accumulate(model, [0, 1], lambda i: model(micro(7, i, 0)) / {0: 1.0}[i])
    assert threading.active_count() == before
    assert not any(engine_of(model).meter.now[kind] for kind in ("gathered", "sums"))
    model.zero_grad()


def evaluated(model: nn.Module) -> None:
    with torch.no_grad():
        model(micro(8, 0, dist.get_rank()))


def in_depth_too(model: nn.Module) -> None:
    """A depth-first pass, whose gradients are cleared."""
    model(micro(9, 0, dist.get_rank())).backward()
    model.zero_grad()


def with_others() -> list[bool]:
    """Whether training stays the same bit by bit with each of these between its steps."""
    expected = sharded(Mined)
    train(expected)
    same = []
    for between in (interrupted, evaluated, in_depth_too):
        model = sharded(Mined)
        train(model, between)
        same.append(equal(weights(model), weights(expected)))
    model, other = (sharded(Mined) for _ in range(2))  # two modules, on topologies of their own
    train(model, lambda _: accumulated(other, 5))
    other.zero_grad()
    return [*same, equal(weights(model), weights(expected))]


def equal(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return list(got) == list(expected) and all(torch.equal(got[name], expected[name]) for name in expected)


def test_nothing_between_steps_changes_the_training() -> None:
    assert on_ranks(RANKS, with_others)[0] == [True] * 4


def on_one_topology() -> bool:
    """Three modules; the loss of one also uses another, frozen for it, that is no chain."""
    topology = lowband.Topology(INNER)
    models = [
        lowband.shard(make(), HIER3, topology, is_layer, compute_dtype=torch.float32)
        for make in (Chain, Chain, Tower)
    ]
    alone, model, teacher = models
    accumulated(alone, 0)

    def loss_of(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            teacher(x)
        return model(x) / MICRO_BATCHES

    parts = [micro(0, i, dist.get_rank()) for i in range(MICRO_BATCHES)]
    lowband.accumulate(model, parts, loss_of)
    return all(torch.equal(a, b) for a, b in zip(gradients(alone), gradients(model), strict=True))


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Of this rank's parts."""
    return [p.grad.as_subclass(torch.Tensor) for p in model.parameters()]


def in_two_calls() -> bool:
    """Under no_sync, then at the boundary: the sum of both calls, as in one call up to the order of sums."""
    model, whole = sharded(Chain), sharded(Chain)
    for each, groups in ((model, ((0, 1), (2,))), (whole, ((0, 1, 2),))):
        for group in groups:
            parts = [micro(0, i, dist.get_rank()) for i in group]
            engine_of(each).sync = group[-1] == 2
            lowband.accumulate(each, parts, each)
    pairs = zip(gradients(model), gradients(whole), strict=True)
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in pairs)


def resumed(folder: Path) -> bool:
    """A checkpoint between two steps: the second gives the same weights."""
    found = []
    for is_resumed in (False, True):
        model = sharded(Chain)
        optimizer = torch.optim.AdamW(model.parameters())
        checkpointer = lowband.Checkpointer(folder)
        if is_resumed:
            checkpointer.load_newest(model, optimizer)
        for step in range(1 if is_resumed else 0, 2):
            accumulated(model, step)
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                checkpointer.save(1, model, optimizer, {})
                checkpointer.wait()
        found.append(weights(model))
    return equal(*found)


def all_of(*works: Callable[[], bool]) -> list[bool]:
    return [work() for work in works]


def test_with_other_modules_calls_and_checkpoints(tmp_path: Path) -> None:
    works = (on_one_topology, in_two_calls, lambda: resumed(tmp_path))
    assert on_ranks(RANKS, all_of, *works)[0] == [True] * 3
