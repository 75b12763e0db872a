"""Replicas that meet seldom train exactly as several models in a single process do; bytes and memory over a
period are those of the closed forms; replicas are equal bit by bit after each exchange, on every wire.
"""

from functools import cache
from pathlib import Path

import pytest
import reference
import torch
import torch.distributed as dist
from started import begun, ended, spec_file
from test_parity import CLIP, CONFIG, SPEC, optimizer_of, part_of_batch
from torch import nn

import lowband
from lowband.cost.bytes import sent_bytes, unit_numels
from lowband.cost.memory import state_bytes
from lowband.engine.passes.engine import engine_of
from lowband.errors import UserError
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from lowband.spec.records import Outcome
from lowband.spec.run import RunSpec
from lowband.spec.scheme import Scheme
from lowband.spec.sync import Sync

EVERY, STEPS = 2, 5  # the last step is one after the last exchange
INNER = {2: {"package": 1, "node": 1}, 4: {"package": 1, "node": 2}, 8: {"package": 2, "node": 4}}
NESTEROV = Sync(beyond="node", every=EVERY, outer="nesterov", learning_rate=0.7, momentum=0.9)
MOMENTUM = Sync(beyond="node", every=EVERY, outer="momentum", momentum=0.7)
HIER3 = {"weights": "package", "grads": "node", "optim": "node"}
SCHEMES = {
    scheme.name: scheme
    for scheme in (
        CONFIG.scheme("local-sgd").model_copy(update={"sync": Sync(beyond="node", every=EVERY)}),
        CONFIG.scheme("slowmo").model_copy(update={"sync": MOMENTUM}),
        CONFIG.scheme("diloco").model_copy(update={"sync": NESTEROV}),
        CONFIG.scheme("diloco").model_copy(update={"sync": NESTEROV, "name": "breadth, recomputed"}),
        Scheme(name="hier3 inside", **HIER3, sync=NESTEROV),
        Scheme(name="ddp inside", weights="self", grads="self", optim="self", sync=MOMENTUM),
        Scheme(name="zero2 inside", weights="self", grads="package", optim="package", sync=NESTEROV),
        Scheme(name="int8", **HIER3, sync=NESTEROV, sync_reduce="int8"),
        Scheme(name="int4", **HIER3, sync=NESTEROV, sync_reduce="int4"),
    )
}
ON = {  # which of them on how many ranks; on 8, a node has two packages
    2: ("diloco",),
    4: ("local-sgd", "slowmo", "breadth, recomputed", "int4"),
    8: ("hier3 inside", "ddp inside", "zero2 inside", "int8"),
}
CASES = [(ranks, name) for ranks, names in ON.items() for name in names]
EXACT = [(ranks, name) for ranks, name in CASES if not SCHEMES[name].is_quantized]


def train(scheme: Scheme, topology: lowband.Topology):
    """By step: this rank's loss, bytes sent, and whether all replicas are equal afterwards; the state."""
    is_breadth = scheme.name.startswith("breadth")
    model = GPT(SPEC, seed=7, recompute="full" if is_breadth else "none")
    lowband.shard(model, scheme, topology, wrap=Block, compute_dtype=torch.float32)
    engine, optimizer = engine_of(model), optimizer_of(model.parameters())
    losses, sent, equal = [], [], []
    for step in range(STEPS):
        batch = part_of_batch(step, 0, dist.get_rank(), dist.get_world_size(), 1)
        if is_breadth:
            [loss] = lowband.accumulate(model, [batch], lambda batch: model(*batch))
        else:
            loss = model(*batch)
            loss.backward()
        lowband.clip_grad_norm_(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        sent.append({(s.level, s.collective, s.wire): s.bytes for s in engine.ledger.take()})
        equal.append(are_equal(engine, topology.levels.size(scheme.sync.beyond)))
    held = dict(engine.meter.peak)
    held["optim"] *= 3  # Adam's moments
    state = lowband.full_state_dict(model)
    lowband.sync_replicas(model)
    equal.append(are_equal(engine, topology.levels.size(scheme.sync.beyond)))
    units = [unit.layout.numel for unit in engine.units]
    return losses, sent, equal, held, units, state


def are_equal(engine, size: int) -> bool:
    """Whether each rank holds the same bits as the same rank of the first replica."""
    mine = torch.cat([unit.master for unit in engine.units])
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return all(torch.equal(everyones[rank], everyones[rank % size]) for rank in range(len(everyones)))


def train_all(inner: dict[str, int]):
    topology = lowband.Topology(inner)
    return {name: train(SCHEMES[name], topology) for name in ON[dist.get_world_size()]}


@cache
def sharded(ranks: int):
    return on_ranks(ranks, train_all, INNER[ranks], time_limit_s=400)


def replicas_of(scheme: Scheme, inner: dict[str, int], ranks: int) -> reference.Replicas:
    """The same training in one process."""
    return reference.Replicas(
        lambda: GPT(SPEC, seed=7),
        lambda model, inputs, targets: model(inputs, targets),
        lambda step, micro, rank: part_of_batch(step, micro, rank, ranks, 1),
        scheme,
        Levels.fit(inner, ranks),
        CLIP,
        optimizer_of,
    )


def train_references(ranks: int):
    return {
        name: reference.train_replicas(replicas_of(SCHEMES[name], INNER[ranks], ranks), STEPS)
        for n, name in EXACT
        if n == ranks
    }


@cache
def single(ranks: int):
    return on_ranks(1, train_references, ranks, time_limit_s=400)[0]


@pytest.mark.parametrize(("ranks", "name"), EXACT)
def test_bit_equal_to_several_models_in_one_process(ranks: int, name: str) -> None:
    losses, agreed = single(ranks)[name]
    for rank, found in enumerate(sharded(ranks)):
        assert found[name][0] == [at_step[rank] for at_step in losses]
    state = sharded(ranks)[0][name][-1]
    for key, expected in agreed.items():
        assert torch.equal(state[key], expected), key


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_replicas_are_equal_after_each_exchange(ranks: int, name: str) -> None:
    for found in sharded(ranks):
        assert found[name][2] == [False, True, False, True, False, True]  # the last by sync_replicas


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_bytes_and_memory_over_a_period_are_those_of_the_closed_forms(ranks: int, name: str) -> None:
    scheme, levels = SCHEMES[name], Levels.fit(INNER[ranks], ranks)
    for _, sent, _, held, units, _ in (found[name] for found in sharded(ranks)):
        counted = {key: sum(step.get(key, 0) for step in sent[2:4]) for key in sent[3]}
        per_step = sent_bytes(units, scheme, levels, "fp32", "fp32", 1, is_clipped=True)
        assert counted == {key: EVERY * value for key, value in per_step.items()}
        states = state_bytes(units, scheme, levels, "fp32", "fp32", 1, "gloo")
        assert {kind: held.get(kind, 0) for kind in states} == states


@pytest.mark.parametrize("device", ["auto", "fake"])
def test_a_run_records_the_mean_over_a_period(tmp_path: Path, device: str) -> None:
    scheme = SCHEMES["diloco"].model_copy(update={"sync": NESTEROV.model_copy(update={"every": 3})})
    path = spec_file(tmp_path, ranks=8, steps=6, scheme=scheme.model_dump(), device=device)
    code, error = ended(begun(path), path)
    assert code == 0, error
    spec, outcome = RunSpec.read_json(path), Outcome.read_json(tmp_path / "outcome.json")
    units = unit_numels(spec.model, spec.levels)
    expected = sent_bytes(units, scheme, spec.levels, "fp32", "fp32", 1, is_clipped=device == "auto")
    assert {(s.level, s.collective, s.wire): s.bytes for s in outcome.sent} == pytest.approx(expected)
    backend = "gloo" if device == "auto" else "fake"
    states = state_bytes(units, scheme, spec.levels, "fp32", "fp32", 1, backend)
    held = {state.kind: state.bytes for state in outcome.states}
    assert {kind: held.get(kind, 0) for kind in states} == states


def misuse() -> list[str]:
    """What is refused, in one line each."""
    topology, said = lowband.Topology({"node": 1}), []
    a_fifth = Scheme(name="a", weights="self", grads="self", optim="self", sync=Sync(beyond="self", every=5))

    def sharded_with(scheme: Scheme, placement_of=None) -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        return lowband.shard(model, scheme, topology, nn.Linear, torch.float32, placement_of=placement_of)

    def refused(call) -> None:
        with pytest.raises(UserError) as error:
            call()
        said.append(str(error.value))

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
    with pytest.raises(UserError) as error:
        Scheme.parse({"name": "x", **HIER3, "sync": {"beyond": "node", **sync}}, "schemes.yaml: x")
    assert part in str(error.value)
    assert "\n" not in str(error.value)
