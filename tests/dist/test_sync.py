"""Replicas that meet seldom train exactly as several models in a single process do; bytes and memory over a
period are those of the closed forms; replicas are equal bit by bit after each exchange, on every wire.
"""

from functools import partial
from pathlib import Path

import pytest
import reference
import seldom
import torch
import torch.distributed as dist
from seldom import HIER3, Cases, Found, are_equal, checked_run
from started import MODEL
from torch import nn

import lowband
from lowband.engine.passes.engine import engine_of
from lowband.engine.replicas.replicas import Others
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme
from lowband.spec.sync import Sync
from tests.checkout import CONFIG
from tests.refused import refusal

EVERY, STEPS = 2, 5  # the last step is one after the last exchange
INNER = {2: {"package": 1, "node": 1}, 4: {"package": 1, "node": 2}, 8: {"package": 2, "node": 4}}
NESTEROV = Sync(beyond="node", every=EVERY, outer="nesterov", learning_rate=0.7, momentum=0.9)
MOMENTUM = Sync(beyond="node", every=EVERY, outer="momentum", momentum=0.7)
SCHEMES = [
    CONFIG.scheme("local-sgd").model_copy(update={"sync": Sync(beyond="node", every=EVERY)}),
    CONFIG.scheme("slowmo").model_copy(update={"sync": MOMENTUM}),
    CONFIG.scheme("diloco").model_copy(update={"sync": NESTEROV}),
    CONFIG.scheme("diloco").model_copy(update={"sync": NESTEROV, "name": "breadth, recomputed"}),
    Scheme(name="hier3 inside", **HIER3, sync=NESTEROV),
    Scheme(name="ddp inside", weights="self", grads="self", optim="self", sync=MOMENTUM),
    Scheme(name="zero2 inside", weights="self", grads="package", optim="package", sync=NESTEROV),
    Scheme(name="int8", **HIER3, sync=NESTEROV, sync_reduce="int8"),
    Scheme(name="int4", **HIER3, sync=NESTEROV, sync_reduce="int4"),
]
ON = {  # which of them on how many ranks; on 8, a node has two packages
    2: ("diloco",),
    4: ("local-sgd", "slowmo", "breadth, recomputed", "int4"),
    8: ("hier3 inside", "ddp inside", "zero2 inside", "int8"),
}


def train(scheme: Scheme, topology: lowband.Topology) -> Found:
    model, found = seldom.train(scheme, topology, STEPS, are_equal)
    lowband.sync_replicas(model)
    found.seen.append(are_equal(model))
    return found


CASES = Cases(SCHEMES, ON, INNER, train, lambda replicas: reference.train_replicas(replicas, STEPS))


@pytest.mark.parametrize(("ranks", "name"), CASES.exact)
def test_bit_equal_to_several_models_in_one_process(ranks: int, name: str) -> None:
    CASES.check_bits(ranks, name)


@pytest.mark.parametrize(("ranks", "name"), CASES.all)
def test_replicas_are_equal_after_each_exchange(ranks: int, name: str) -> None:
    for found in CASES.found(ranks, name):
        assert found.seen == [False, True, False, True, False, True]  # the last by sync_replicas


@pytest.mark.parametrize(("ranks", "name"), CASES.all)
def test_bytes_and_memory_over_a_period_are_those_of_the_closed_forms(ranks: int, name: str) -> None:
    CASES.check_bytes_and_memory(ranks, name, [2])


@pytest.mark.parametrize("device", ["auto", "fake"])
def test_a_run_records_the_mean_over_a_period(tmp_path: Path, device: str) -> None:
    scheme = CASES.schemes["diloco"].model_copy(update={"sync": NESTEROV.model_copy(update={"every": 3})})
    checked_run(tmp_path, scheme, device, ranks=8, steps=6, model=MODEL)


class Warming(torch.optim.SGD):
    """Its own step makes its base's."""

    def step(self, closure=None):
        self.param_groups[0]["lr"] = min(0.1, self.param_groups[0]["lr"] + 0.01)
        return super().step(closure)


class Around(torch.optim.Optimizer):
    """Its step makes another one's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(inner.param_groups, {})
        self.inner = inner

    def step(self, closure=None):
        return self.inner.step(closure)


class Adopting(torch.optim.SGD):
    """Made before lowband.shard, and given the shards by an assignment."""


def counted_late() -> list[list[int]]:
    """Steps since the last exchange, after each, of optimizers made before; a scheduler keeps the step of
    one as it was then."""
    found = []
    for is_scheduled in (False, True):
        module = nn.Linear(4, 4)
        optimizer = (torch.optim.Adadelta if is_scheduled else Adopting)(module.parameters(), lr=0.1)
        if is_scheduled:
            torch.optim.lr_scheduler.LambdaLR(optimizer, float)
        scheme = Scheme(name="a", **HIER3, sync=Sync(beyond="node", every=3))
        model = lowband.shard(module, scheme, lowband.Topology(INNER[2]), nn.Linear, torch.float32)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        since = []
        for _ in range(4):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            since.append(engine_of(model).replicas.steps)
        found.append(since)
    return found


def test_steps_of_optimizers_that_got_their_shards_late_are_counted() -> None:
    assert on_ranks(2, counted_late)[0] == [[1, 2, 0, 1]] * 2


def steps_counted() -> list[tuple[list[int], int]]:
    """Those since the last exchange, after each, and all that jobs which are replicas of others have seen."""
    found, topology = [], lowband.Topology(INNER[2])
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)  # from now on torch calls hooks of its steps
    for make in (torch.optim.SGD, Warming, lambda *given, lr: Around(torch.optim.SGD(*given, lr=lr))):
        scheme = Scheme(name="a", **HIER3, sync=Sync(beyond="node", every=3))
        model = lowband.shard(nn.Linear(4, 4), scheme, topology, nn.Linear, torch.float32)
        optimizer, replicas = make(model.parameters(), lr=0.1), engine_of(model).replicas
        since, seen = [], []
        replicas.others = Others(partial(seen.append, 1), lambda: None, lambda *_: None)
        for _ in range(4):
            model(torch.ones(1, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            since.append(replicas.steps)
        found.append((since, len(seen)))
    return found


def test_a_step_inside_of_a_step_is_one() -> None:
    assert on_ranks(2, steps_counted)[0] == [([1, 2, 0, 1], 4)] * 3


def agreed_again() -> list[bool]:
    """Whether `sync_replicas` has changed the weights: after a period's end, again, and after a step more."""
    topology = lowband.Topology({"node": 1})
    sync = Sync(beyond="node", every=2, outer="nesterov", learning_rate=0.7, momentum=0.9)
    scheme = Scheme(name="sync", weights="node", grads="node", optim="node", sync=sync)
    model = lowband.shard(nn.Sequential(nn.Linear(4, 4)), scheme, topology, nn.Linear, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    changed = []

    def step() -> None:
        model(torch.full((1, 4), 1.0 + dist.get_rank())).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def values() -> list[list[float]]:
        return [p.tolist() for p in model.parameters()]

    def agree() -> None:
        before = values()
        lowband.sync_replicas(model)
        changed.append(before != values())

    step()
    step()
    agree()
    agree()
    step()
    agree()
    agree()
    return changed


def test_replicas_that_agree_are_not_moved_on_by_their_momentum() -> None:
    assert on_ranks(2, agreed_again) == [[False, False, True, False]] * 2


def apart() -> str:
    """What the first step says where each replica's weights were written by its own rank."""
    scheme = Scheme(name="a", **HIER3, sync=Sync(beyond="node", every=2))
    model = lowband.shard(nn.Linear(4, 4), scheme, lowband.Topology(INNER[2]), nn.Linear, torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.distributed.get_rank())
    model(torch.ones(1, 4)).sum().backward()
    return refusal(torch.optim.SGD(model.parameters(), lr=0.1).step)


def test_replicas_that_begin_with_other_weights_are_refused() -> None:
    """They would never agree: each has an anchor of its own."""
    for said in on_ranks(2, apart):
        assert "'root' on rank 1 has other weights than on rank 0" in said


def misuse() -> list[str]:
    """What is refused, in one line each."""
    topology, said = lowband.Topology({"node": 1}), []
    a_fifth = Scheme(name="a", weights="self", grads="self", optim="self", sync=Sync(beyond="self", every=5))

    def sharded_with(scheme: Scheme, placement_of=None) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        return lowband.shard(model, scheme, topology, nn.Linear, torch.float32, placement_of=placement_of)

    def refused(call) -> None:
        said.append(refusal(call))

    model = sharded_with(a_fifth)
    with torch.no_grad():  # weights may be loaded after lowband.shard: they are the anchor
        for parameter in model.parameters():
            parameter.fill_(2.0)
    assert all((value == 2).all() for value in lowband.full_state_dict(model).values())
    first, second = (torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model)
    for _ in range(7):  # several optimizers make one step together
        model(torch.ones(1, 4)).sum().backward()
        first.step()
        second.step()
        if not engine_of(model).replicas.steps:
            assert all((value != 2).all() for value in lowband.full_state_dict(model).values())
    assert engine_of(model).replicas.steps == 2
    first.step()
    refused(first.step)
    refused(lambda: lowband.Matrices(model, select=lambda name, shape: len(shape) == 2))
    plain = Scheme(name="plain", weights="self", grads="self", optim="self")
    refused(lambda: lowband.sync_replicas(sharded_with(plain)))
    refused(lambda: sharded_with(a_fifth, placement_of=lambda name, _: plain if name == "1" else None))
    for placed in (
        {"sync": Sync(beyond="rack", every=1)},
        {"sync": Sync(beyond="world", every=1)},
        {"optim": "node", "sync": Sync(beyond="self", every=1)},
        {"optim": "world", "sync": Sync(beyond="node", every=1)},
    ):
        refused(lambda placed=placed: sharded_with(a_fifth.model_copy(update=placed)))
    return said


def test_misuse_is_refused_in_one_line() -> None:
    said = on_ranks(2, misuse)[0]
    expected = [
        "was stepped twice before '1.bias' was stepped once (allowed: optimizers that together",
        "Matrices cannot train replicas that meet seldom (allowed: schemes without sync)",
        "the scheme has no sync",
        "another sync than the module's (allowed: the sync of scheme 'a' for every unit)",
        "(rack) must be the optimizer's level (self) or one between it and world (allowed: self, node)",
        "sync.beyond (world) must be",
        "sync.beyond (self) must be the optimizer's level (node) or one between it and world (allowed: node)",
        "sync has no replicas: the optimizer's level is world",
    ]
    assert len(said) == len(expected)
    for line, part in zip(said, expected, strict=True):
        assert part in line
        assert "\n" not in line


@pytest.mark.parametrize(
    ("sync", "part"),
    [
        ({"every": 0}, "sync.every: Input should be greater than 0"),
        ({"every": 2, "momentum": 0.9}, "outer average has neither learning_rate nor momentum"),
        ({"every": 2, "outer": "nesterov"}, "outer nesterov has a momentum above 0"),
        ({"every": 2, "outer": "adam"}, "sync.outer: Input should be 'average', 'momentum' or 'nesterov'"),
        ({"evry": 2}, "unknown key 'sync.evry' (allowed: beyond, delay, every, fragments, "),
    ],
)
def test_a_sync_that_does_not_fit_is_refused_in_one_line(sync: dict[str, object], part: str) -> None:
    assert part in refusal(
        Scheme.parse, {"name": "x", **HIER3, "sync": {"beyond": "node", **sync}}, "schemes.yaml: x"
    )
