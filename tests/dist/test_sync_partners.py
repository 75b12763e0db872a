"""Replicas that average with one partner at a time train exactly as several models in one process do; bytes,
memory and the distance between replicas are those computed from outside; checkpoints, runs, refusals.
"""

from functools import cache, partial
from pathlib import Path

import pytest
import reference
import torch
import torch.distributed as dist
from started import begun, ended, spec_file
from test_checkpoint import train as train_between
from test_parity import CLIP, CONFIG, SPEC, optimizer_of, part_of_batch
from test_sync import HIER3, are_equal, replicas_of
from test_sync_checkpoint import build, masters
from test_sync_late import DDP, ZERO3

import lowband
from lowband.cost.bytes import sent_bytes, unit_numels
from lowband.cost.memory import state_bytes
from lowband.engine.passes.engine import engine_of
from lowband.errors import UserError
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from lowband.spec.records import Outcome, RunFolder
from lowband.spec.run import RunSpec
from lowband.spec.scheme import Scheme
from lowband.spec.sync import Sync

STEPS = 5
INNER = {
    1: {"package": 1, "node": 1}, 2: {"package": 1, "node": 1}, 3: {"package": 1, "node": 1},
    4: {"package": 1, "node": 1}, 8: {"package": 1, "node": 2},
}  # fmt: skip
ONE_PEER = {"beyond": "node", "every": 1, "partners": "exponential"}
RING = {"beyond": "node", "every": 1, "partners": "ring"}
SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme(name="exponential", **ZERO3, sync=Sync(**ONE_PEER)),
        Scheme(name="exponential, late", **ZERO3, sync=Sync(**ONE_PEER, delay=1)),
        Scheme(name="ring", **HIER3, sync=Sync(**RING)),
        Scheme(name="ring, late", **ZERO3, sync=Sync(**RING, delay=1)),
        Scheme(name="seldom, ddp inside", **DDP, sync=Sync(**ONE_PEER | {"every": 2}, delay=2)),
        Scheme(name="int8", **ZERO3, sync=Sync(**ONE_PEER), sync_swap="int8"),
    )
}
ON = {
    1: ("exponential", "ring, late"),
    2: ("exponential", "ring, late"),
    3: ("exponential, late",),
    4: ("exponential", "exponential, late", "ring", "int8"),
    8: ("exponential, late", "ring", "seldom, ddp inside"),
}
CASES = [(ranks, name) for ranks, names in ON.items() for name in names]
EXACT = [(ranks, name) for ranks, name in CASES if not SCHEMES[name].is_quantized]


def train(scheme: Scheme, topology: lowband.Topology):
    """By step: this rank's loss, bytes sent, and the distance; its weights; the state at the end."""
    model = GPT(SPEC, seed=7)
    lowband.shard(model, scheme, topology, wrap=Block, compute_dtype=torch.float32)
    engine, optimizer = engine_of(model), optimizer_of(model.parameters())
    losses, sent, distances, weights = [], [], [], []
    for step in range(STEPS):
        loss = model(*part_of_batch(step, 0, dist.get_rank(), dist.get_world_size(), 1))
        loss.backward()
        lowband.clip_grad_norm_(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        sent.append({(s.level, s.collective, s.wire): s.bytes for s in engine.ledger.take()})
        distances.append(lowband.consensus_distance(model))
        weights.append(torch.cat([unit.master.clone() for unit in engine.units]))
    held = dict(engine.meter.peak)
    held["optim"] *= 3  # Adam's moments
    state = lowband.full_state_dict(model)
    lowband.sync_replicas(model)
    assert are_equal(engine, topology.levels.size(scheme.sync.beyond))
    assert lowband.consensus_distance(model) < 1e-6
    again = lowband.full_state_dict(model)
    assert all(torch.allclose(again[key], value, atol=1e-7) for key, value in state.items())
    return losses, sent, held, [unit.layout.numel for unit in engine.units], state, distances, weights


def train_all(inner: dict[str, int]):
    topology = lowband.Topology(inner)
    return {name: train(SCHEMES[name], topology) for name in ON[dist.get_world_size()]}


@cache
def sharded(ranks: int):
    return on_ranks(ranks, train_all, INNER[ranks], time_limit_s=400)


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


def train_references(ranks: int):
    found = {}
    for name in (name for n, name in EXACT if n == ranks):
        replicas = replicas_of(SCHEMES[name], INNER[ranks], ranks)
        sources = partial(source, SCHEMES[name], len(replicas.trained))
        found[name] = reference.train_partners(replicas, STEPS, sources)
    return found


@cache
def single(ranks: int):
    return on_ranks(1, train_references, ranks, time_limit_s=400)[0]


@pytest.mark.parametrize(("ranks", "name"), EXACT)
def test_bit_equal_to_several_models_in_one_process(ranks: int, name: str) -> None:
    losses, means = single(ranks)[name]
    for rank, found in enumerate(sharded(ranks)):
        assert found[name][0] == [at_step[rank] for at_step in losses]
    state = sharded(ranks)[0][name][4]
    for key, expected in means.items():
        assert torch.equal(state[key], expected), key


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_bytes_and_memory_are_those_of_the_closed_forms(ranks: int, name: str) -> None:
    scheme, levels = SCHEMES[name], Levels.fit(INNER[ranks], ranks)
    every = scheme.sync.every
    for _, sent, held, units, *_ in (found[name] for found in sharded(ranks)):
        per_step = sent_bytes(units, scheme, levels, "fp32", "fp32", 1, is_clipped=True)
        counted = {key: sum(step.get(key, 0) for step in sent[-every:]) for key in per_step}
        assert counted == {key: every * value for key, value in per_step.items()}
        if ranks > 1:
            swapped = sum(value for key, value in per_step.items() if key[1] == "sync_swap")
            width = 4 if name != "int8" else 1 + 4 / scheme.block_size  # codes, and a scale per block
            assert swapped == width * sum(units) / levels.size("node") / every
        states = state_bytes(units, scheme, levels, "fp32", "fp32", 1, "gloo")
        assert {kind: held.get(kind, 0) for kind in states} == states
        assert "anchor" not in held
        assert ("in_flight" in states) == (scheme.sync.delay > 0)


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_the_distance_is_that_of_all_weights_side_by_side(ranks: int, name: str) -> None:
    """Seen from all ranks: with a whole replica on a rank, or ranks of a replica one after the other."""
    size = min(INNER[ranks]["node"], ranks)
    by_rank = [found[name] for found in sharded(ranks)]
    for step in range(STEPS):
        shards = [found[-1][step] for found in by_rank]
        if SCHEMES[name].optim == "self":
            shards = shards[::size]
            replicas = torch.stack(shards).double()
        else:
            whole = [torch.cat(shards[first : first + size]) for first in range(0, ranks, size)]
            replicas = torch.stack(whole).double()
        expected = (replicas - replicas.mean(dim=0)).square().sum(dim=1).mean().sqrt()
        for found in by_rank:
            assert found[-2][step] == pytest.approx(float(expected), rel=1e-4, abs=1e-5)


def test_two_replicas_are_equal_after_each_exchange() -> None:
    for name, is_late in (("exponential", False), ("ring, late", True)):
        first, second = (found[name][-1] for found in sharded(2))
        equal = [torch.equal(a, b) for a, b in zip(first, second, strict=True)]
        assert equal == [not is_late] * STEPS


def distance_of_what_is_frozen() -> float:
    model = GPT(SPEC, seed=7).requires_grad_(False)
    lowband.shard(model, SCHEMES["exponential"], lowband.Topology(INNER[2]), Block, torch.float32)
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
KEPT = ("exponential", "exponential, late", "ring, late", "seldom, ddp inside")


def save_and_go_on(folder: str):
    found = {}
    for name in KEPT:
        model, optimizer = build(SCHEMES[name], lowband.Topology(INNER[4]))
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
        model, optimizer = build(SCHEMES[name], lowband.Topology(INNER[4]))
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
        (anchored, "exponential, late"), (SCHEMES["exponential"], "anchored"),
        (SCHEMES["exponential"].model_copy(update={"sync": None}), "exponential, late"),
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
    model, optimizer = build(SCHEMES["exponential"], lowband.Topology(INNER[4]))
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


def run(folder: Path, **options) -> tuple[RunSpec, RunFolder]:
    path = spec_file(folder, **options)
    code, error = ended(begun(path), path)
    assert code == 0, error
    return RunSpec.read_json(path), RunFolder(folder)


@pytest.mark.parametrize("device", ["auto", "fake"])
def test_a_run_records_bytes_memory_and_distance(tmp_path: Path, device: str) -> None:
    scheme = SCHEMES["exponential, late"].model_copy(update={"sync": Sync(**ONE_PEER, delay=1)})
    spec, folder = run(
        tmp_path, ranks=4, steps=4, scheme=scheme.model_dump(), device=device,
        machine=CONFIG.machine("local-nodes").model_dump(),
    )  # fmt: skip
    outcome = Outcome.read_json(folder.outcome)
    units = unit_numels(spec.model, spec.levels)
    expected = sent_bytes(units, scheme, spec.levels, "fp32", "fp32", 1, is_clipped=device == "auto")
    assert {(s.level, s.collective, s.wire): s.bytes for s in outcome.sent} == pytest.approx(expected)
    backend = "gloo" if device == "auto" else "fake"
    states = state_bytes(units, scheme, spec.levels, "fp32", "fp32", 1, backend)
    held = {state.kind: state.bytes for state in outcome.states}
    assert {kind: held.get(kind, 0) for kind in states} == states
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
    with pytest.raises(UserError) as error:
        scheme.check(Levels.fit({"node": 2}, 6))
    assert str(error.value).startswith("scheme 'a': ")
    assert part in str(error.value)
    assert "\n" not in str(error.value)
