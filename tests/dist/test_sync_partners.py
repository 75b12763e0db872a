"""Replicas that average with one partner at a time train exactly as several models in one process do; bytes,
memory and the distance between replicas are those computed from outside; checkpoints, runs, refusals.
"""

from functools import partial
from pathlib import Path

import pytest
import reference
import seldom
import torch
from seldom import DDP, HIER3, ZERO3, Cases, Found, are_equal, checked_run
from started import MODEL
from test_checkpoint import train as train_between
from test_parity import SPEC
from test_sync_checkpoint import build, masters
from torch import nn

import lowband
from lowband.engine.passes.engine import engine_of
from lowband.errors import UserError
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from lowband.spec.scheme import Scheme
from lowband.spec.sync import Sync
from tests.checkout import CONFIG
from tests.refused import refusal

STEPS = 5
INNER = {
    1: {"package": 1, "node": 1}, 2: {"package": 1, "node": 1}, 3: {"package": 1, "node": 1},
    4: {"package": 1, "node": 1}, 8: {"package": 1, "node": 2},
}  # fmt: skip
ONE_PEER = {"beyond": "node", "every": 1, "partners": "exponential"}
RING = {"beyond": "node", "every": 1, "partners": "ring"}
SCHEMES = [
    Scheme(name="exponential", **ZERO3, sync=Sync(**ONE_PEER)),
    Scheme(name="exponential, late", **ZERO3, sync=Sync(**ONE_PEER, delay=1)),
    Scheme(name="ring", **HIER3, sync=Sync(**RING)),
    Scheme(name="ring, late", **ZERO3, sync=Sync(**RING, delay=1)),
    Scheme(name="seldom, ddp inside", **DDP, sync=Sync(**ONE_PEER | {"every": 2}, delay=2)),
    Scheme(name="int8", **ZERO3, sync=Sync(**ONE_PEER), sync_swap="int8"),
]
ON = {
    1: ("exponential", "ring, late"),
    2: ("exponential", "ring, late"),
    3: ("exponential, late",),
    4: ("exponential", "exponential, late", "ring", "int8"),
    8: ("exponential, late", "ring", "seldom, ddp inside"),
}


def train(scheme: Scheme, topology: lowband.Topology) -> Found:
    model, found = seldom.train(scheme, topology, STEPS, distance_and_weights)
    lowband.sync_replicas(model)
    assert are_equal(model)
    assert lowband.consensus_distance(model) < 1e-6
    again = lowband.full_state_dict(model)
    assert all(torch.allclose(again[key], value, atol=1e-7) for key, value in found.state.items())
    return found


def distance_and_weights(model: nn.Module) -> tuple[float, torch.Tensor]:
    weights = torch.cat([unit.master.clone() for unit in engine_of(model).units])
    return lowband.consensus_distance(model), weights


def source(scheme: Scheme, replicas: int, exchange: int, replica: int) -> int:
    """From whom a replica receives, from the definitions."""
    if replicas == 1:
        return 0
    if scheme.sync.partners == "ring":
        first = exchange % 2  # pairs begin there
        pairs = [(i % replicas, (i + 1) % replicas) for i in range(first, replicas + first, 2)]
        return next(b if a == replica else a for a, b in pairs if replica in (a, b))
    distances = [2**i for i in range(10) if 2**i < replicas]
    return (replica - distances[exchange % len(distances)]) % replicas


def reference_of(replicas: reference.Replicas):
    sources = partial(source, replicas.scheme, len(replicas.trained))
    return reference.train_partners(replicas, STEPS, sources)


CASES = Cases(SCHEMES, ON, INNER, train, reference_of, wide=(8,))


@pytest.mark.parametrize(("ranks", "name"), CASES.exact)
def test_bit_equal_to_several_models_in_one_process(ranks: int, name: str) -> None:
    CASES.check_bits(ranks, name)


@pytest.mark.parametrize(("ranks", "name"), CASES.all)
def test_bytes_and_memory_are_those_of_the_closed_forms(ranks: int, name: str) -> None:
    scheme, levels = CASES.schemes[name], CASES.levels(ranks)
    every = scheme.sync.every
    states, per_step = CASES.check_bytes_and_memory(ranks, name, [STEPS - every])
    for found in CASES.found(ranks, name):
        assert "anchor" not in found.held
        if ranks > 1:
            swapped = sum(value for key, value in per_step.items() if key[1] == "sync_swap")
            width = 4 if name != "int8" else 1 + 4 / scheme.block_size  # codes, and a scale per block
            assert swapped == width * sum(found.units) / levels.size("node") / every
    assert ("in_flight" in states) == (scheme.sync.delay > 0)


@pytest.mark.parametrize(("ranks", "name"), CASES.all)
def test_the_distance_is_that_of_all_weights_side_by_side(ranks: int, name: str) -> None:
    """Seen from all ranks: with a whole replica on a rank, or ranks of a replica one after the other."""
    size = min(INNER[ranks]["node"], ranks)
    by_rank = CASES.found(ranks, name)
    for step in range(STEPS):
        shards = [found.seen[step][1] for found in by_rank]
        if CASES.schemes[name].optim == "self":
            shards = shards[::size]
            replicas = torch.stack(shards).double()
        else:
            whole = [torch.cat(shards[first : first + size]) for first in range(0, ranks, size)]
            replicas = torch.stack(whole).double()
        expected = (replicas - replicas.mean(dim=0)).square().sum(dim=1).mean().sqrt()
        for found in by_rank:
            assert found.seen[step][0] == pytest.approx(float(expected), rel=1e-4, abs=1e-5)


def test_two_replicas_are_equal_after_each_exchange() -> None:
    for name, is_late in (("exponential", False), ("ring, late", True)):
        first, second = (found.seen for found in CASES.found(2, name))
        equal = [torch.equal(a, b) for (_, a), (_, b) in zip(first, second, strict=True)]
        assert equal == [not is_late] * STEPS


def distance_of_what_is_frozen() -> float:
    model = GPT(SPEC, seed=7).requires_grad_(False)
    lowband.shard(model, CASES.schemes["exponential"], lowband.Topology(INNER[2]), Block, torch.float32)
    return lowband.consensus_distance(model)


def test_frozen_replicas_are_not_apart() -> None:
    assert on_ranks(2, distance_of_what_is_frozen) == [0, 0]


def distance_on_a_wire() -> tuple[float, torch.Tensor]:
    scheme = Scheme(name="int4", **ZERO3, sync=Sync(beyond="node", every=9), sync_reduce="int4")
    model, optimizer = build(scheme, lowband.Topology(INNER[4]))
    train_between(model, optimizer, 0, 2)
    return lowband.consensus_distance(model), masters(model)


def test_the_distance_does_not_depend_on_the_wire() -> None:
    found = on_ranks(4, distance_on_a_wire, time_limit_s=200)
    replicas = torch.stack([weights for _, weights in found]).double()
    expected = (replicas - replicas.mean(dim=0)).square().sum(dim=1).mean().sqrt()
    assert [distance for distance, _ in found] == pytest.approx([float(expected)] * 4, rel=1e-4)


# ---- checkpoints

SAVED, LAST = 3, 6
KEPT = ("exponential, late", "ring, late", "seldom, ddp inside")


def save_and_go_on(folder: str):
    found = {}
    for name in KEPT:
        model, optimizer = build(CASES.schemes[name], lowband.Topology(INNER[4]))
        checkpointer = lowband.Checkpointer(Path(folder) / name)
        train_between(model, optimizer, 0, SAVED)
        checkpointer.save(SAVED, model, optimizer, {})
        train_between(model, optimizer, SAVED, LAST)  # while it is written
        checkpointer.wait()
        found[name] = masters(model), lowband.full_state_dict(model)
    return found


def go_on(folder: str):
    found = {}
    for name in KEPT:
        model, optimizer = build(CASES.schemes[name], lowband.Topology(INNER[4]))
        train_between(model, optimizer, 0, 2)  # has an exchange of its own on its way, which is dropped
        checkpointer = lowband.Checkpointer(Path(folder) / name)
        checkpointer.load(checkpointer.latest(), model, optimizer)
        train_between(model, optimizer, SAVED, LAST)
        found[name] = masters(model), lowband.full_state_dict(model)
    return found


def load_under_others(folder: str) -> list[str]:
    said = []
    anchored = Scheme(name="anchored", **ZERO3, sync=Sync(beyond="node", every=1))
    for scheme, name in (
        (anchored, "exponential, late"), (CASES.schemes["exponential"], "anchored"),
        (CASES.schemes["exponential"].model_copy(update={"sync": None}), "exponential, late"),
    ):  # fmt: skip
        checkpointer = lowband.Checkpointer(Path(folder) / name)
        if name == "anchored":
            model, optimizer = build(anchored, lowband.Topology(INNER[4]))
            train_between(model, optimizer, 0, 1)
            checkpointer.save(1, model, optimizer, {})
            checkpointer.wait()
        model, optimizer = build(scheme, lowband.Topology(INNER[4]))
        before = masters(model)
        with pytest.raises(UserError) as error:
            checkpointer.load(checkpointer.latest(), model, optimizer)
        assert torch.equal(before, masters(model))
        said.append(str(error.value))
    # Without a delay what is on its way arrives with the next exchange.
    model, optimizer = build(CASES.schemes["exponential"], lowband.Topology(INNER[4]))
    checkpointer = lowband.Checkpointer(Path(folder) / "exponential, late")
    checkpointer.load(checkpointer.latest(), model, optimizer)
    assert all(each.is_in_flight for each in engine_of(model).replicas.exchanges)
    train_between(model, optimizer, SAVED, LAST)
    assert not engine_of(model).meter.now["in_flight"]
    return said


def test_training_resumes_with_the_same_bits(tmp_path: Path) -> None:
    expected = on_ranks(4, save_and_go_on, str(tmp_path), time_limit_s=300)
    found = on_ranks(4, go_on, str(tmp_path), time_limit_s=300)
    for rank in range(4):
        for name in KEPT:
            ours, theirs = found[rank][name], expected[rank][name]
            assert torch.equal(ours[0], theirs[0]), name
            assert all(torch.equal(ours[1][key], value) for key, value in theirs[1].items()), name
    said = on_ranks(4, load_under_others, str(tmp_path), time_limit_s=300)[0]
    assert len(said) == 3
    for line in said:
        assert "\n" not in line
    assert "sync.anchor" in said[0]
    assert "sync.anchor" in said[1]
    assert "was saved by 4 replicas that meet seldom" in said[2]


# ---- runs


@pytest.mark.parametrize("device", ["auto", "fake"])
def test_a_run_records_bytes_memory_and_distance(tmp_path: Path, device: str) -> None:
    scheme = CASES.schemes["exponential, late"].model_copy(update={"sync": Sync(**ONE_PEER, delay=1)})
    machine = CONFIG.machine("local-nodes").model_dump()
    _, outcome = checked_run(tmp_path, scheme, device, ranks=4, steps=4, machine=machine, model=MODEL)
    if device == "auto":
        assert outcome.consensus_distance > 0


# ---- bad input


@pytest.mark.parametrize(
    ("scheme", "part"),
    [
        (Scheme(name="a", **DDP, sync=Sync(**ONE_PEER | {"beyond": "self"})),
         "sync.partners exponential: 2 levels lie between replicas (self) and world (allowed: "
         "sync.beyond node)"),
        (Scheme(name="a", **DDP, sync=Sync(**RING)),
         "sync.partners ring: 3 replicas do not make pairs (allowed: an even number of replicas, or partners "
         "exponential)"),
        (Scheme(name="a", **DDP, sync=Sync(**ONE_PEER), sync_reduce="int8"),
         "sync_reduce int8: replicas meet by sync_swap (allowed: sync_reduce native)"),
        (Scheme(name="a", **DDP, sync=Sync(beyond="node", every=1), sync_swap="int8"),
         "sync_swap int8: replicas meet by sync_reduce (allowed: sync_swap native)"),
    ],
)  # fmt: skip
def test_a_scheme_that_does_not_fit_is_refused_in_one_line(scheme: Scheme, part: str) -> None:
    said = refusal(lambda: scheme.check(Levels.fit({"node": 2}, 6)))
    assert said.startswith("scheme 'a': ")
    assert part in said


def chain(is_tied: bool) -> list[nn.Module]:
    torch.manual_seed(0)
    embed, head = nn.Embedding(11, 8), nn.Linear(8, 11, bias=False)
    if is_tied:
        head.weight = embed.weight
    return [embed, nn.Linear(8, 8), head]


def tokens(replica: int) -> torch.Tensor:
    return torch.randint(11, (2, 2, 8), generator=torch.Generator().manual_seed(replica))


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def distance_over_stages(is_tied: bool) -> float:
    scheme = Scheme(
        name="apart", weights="self", grads="self", optim="self", sync=Sync(beyond="self", every=4)
    )
    topology = lowband.Topology({}, lowband.Axes(pipeline=2))
    pipeline = lowband.Pipeline(
        chain(is_tied), cross_entropy, scheme, topology, 1, compute_dtype=torch.float32
    )
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.5)
    pipeline.step([tuple(tokens(topology.along("data").place))])
    optimizer.step()
    return lowband.consensus_distance(pipeline)


def distance_of_whole_models(is_tied: bool) -> float:
    weights = []
    for replica in range(2):
        model = nn.Sequential(*chain(is_tied))
        inputs, labels = tokens(replica)
        cross_entropy(model(inputs), labels).backward()
        torch.optim.SGD(model.parameters(), lr=0.5).step()
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).double())
    return ((weights[0] - weights[1]) / 2).norm().item()


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_distance_is_over_all_stages(is_tied: bool) -> None:
    [expected] = on_ranks(1, distance_of_whole_models, is_tied)
    assert on_ranks(4, distance_over_stages, is_tied) == pytest.approx([expected] * 4, rel=1e-5)
