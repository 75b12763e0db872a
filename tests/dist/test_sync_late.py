"""Exchanges between replicas that arrive later than they start, or of a part of the units: exactly what
several models in a single process do; bytes and memory as in closed form; anchors equal bit by bit.
"""

import itertools
import threading
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
import reference
import torch
import torch.distributed as dist
from started import begun, ended, spec_file
from test_parity import CLIP, CONFIG, SPEC, optimizer_of, part_of_batch
from test_sync import HIER3, INNER, are_equal, replicas_of

import lowband
from lowband.cost.bytes import sent_bytes, transfers, unit_numels
from lowband.cost.memory import state_bytes
from lowband.engine.passes.engine import engine_of
from lowband.engine.transport import lane
from lowband.errors import UserError
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from lowband.spec.records import Outcome, RunFolder
from lowband.spec.run import RunSpec
from lowband.spec.scheme import Scheme
from lowband.spec.sync import Sync

EVERY, STEPS = 3, 10
NESTEROV = {"beyond": "node", "every": EVERY, "outer": "nesterov", "learning_rate": 0.7, "momentum": 0.9}
MOMENTUM = {"beyond": "node", "every": EVERY, "outer": "momentum", "momentum": 0.5}
ZERO3 = {"weights": "node", "grads": "node", "optim": "node"}
DDP = {"weights": "self", "grads": "self", "optim": "self"}
SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme(name="one late", **ZERO3, sync=Sync(**NESTEROV, delay=1)),
        Scheme(name="one late, mixed", **ZERO3, sync=Sync(**NESTEROV, delay=1, mix=0.5)),
        Scheme(name="a period late", **ZERO3, sync=Sync(**MOMENTUM, delay=EVERY, mix=0.25)),
        Scheme(name="mixed at once", **HIER3, sync=Sync(beyond="node", every=EVERY, mix=0.5)),
        Scheme(name="two late, ddp inside", **DDP, sync=Sync(**NESTEROV, delay=2, mix=0.3)),
        Scheme(name="fragments", **ZERO3, sync=Sync(**NESTEROV, fragments=3)),
        Scheme(name="fragments, late", **HIER3, sync=Sync(**NESTEROV, fragments=3, delay=2, mix=0.5)),
        Scheme(
            name="two outer levels",
            weights="package",
            grads="package",
            optim="package",
            sync=Sync(**MOMENTUM | {"beyond": "package"}, fragments=3, delay=1, mix=0.5),
        ),
        Scheme(name="int4, late", **HIER3, sync=Sync(**NESTEROV, delay=2, mix=0.5), sync_reduce="int4"),
    )
}
ON = {
    2: ("one late", "a period late", "fragments"),
    4: ("one late, mixed", "mixed at once", "fragments, late", "int4, late"),
    8: ("two late, ddp inside", "two outer levels", "fragments, late"),
}
CASES = [(ranks, name) for ranks, names in ON.items() for name in names]
EXACT = [(ranks, name) for ranks, name in CASES if not SCHEMES[name].is_quantized]


def train(scheme: Scheme, topology: lowband.Topology):
    """By step: this rank's loss, bytes sent, whether all replicas and all anchors are equal; the state."""
    model = GPT(SPEC, seed=7)
    lowband.shard(model, scheme, topology, wrap=Block, compute_dtype=torch.float32)
    engine, optimizer = engine_of(model), optimizer_of(model.parameters())
    losses, sent, equal = [], [], []
    for step in range(STEPS):
        loss = model(*part_of_batch(step, 0, dist.get_rank(), dist.get_world_size(), 1))
        loss.backward()
        lowband.clip_grad_norm_(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        sent.append({(s.level, s.collective, s.wire): s.bytes for s in engine.ledger.take()})
        equal.append(are_equal(engine, topology.levels.size(scheme.sync.beyond)))
        assert anchors_are_equal(engine)
    held = dict(engine.meter.peak)
    held["optim"] *= 3  # Adam's moments
    state = lowband.full_state_dict(model)
    lowband.sync_replicas(model)
    equal.append(are_equal(engine, topology.levels.size(scheme.sync.beyond)))
    assert not engine.meter.now["in_flight"]
    return losses, sent, equal, held, [unit.layout.numel for unit in engine.units], state


def anchors_are_equal(engine) -> bool:
    """Whether each rank holds the same piece of the anchor as the same rank of the first replica."""
    mine = torch.cat([each.agreed()[0] for each in engine.replicas.exchanges])
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    size = engine.axis.levels.size(engine.replicas.sync.beyond)
    return all(torch.equal(everyones[rank], everyones[rank % size]) for rank in range(len(everyones)))


def train_all(inner: dict[str, int]):
    topology = lowband.Topology(inner)
    return {name: train(SCHEMES[name], topology) for name in ON[dist.get_world_size()]}


@cache
def sharded(ranks: int):
    return on_ranks(ranks, train_all, INNER[ranks], time_limit_s=400)


def train_references(ranks: int):
    return {
        name: reference.train_replicas(
            replicas_of(SCHEMES[name], INNER[ranks], ranks),
            STEPS,
            lambda name: int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 0,
        )
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
def test_replicas_are_equal_where_nothing_of_their_own_remains(ranks: int, name: str) -> None:
    sync = SCHEMES[name].sync
    arrives = lambda t: t > sync.delay and (t - sync.delay) % EVERY == 0  # noqa: E731
    agree = not sync.mix and sync.fragments == 1
    arrivals = [agree and arrives(t) for t in range(1, STEPS + 1)]
    for found in sharded(ranks):
        assert found[name][2] == [*arrivals, True]  # the last by sync_replicas


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_bytes_and_memory_over_a_period_are_those_of_the_closed_forms(ranks: int, name: str) -> None:
    scheme, levels = SCHEMES[name], Levels.fit(INNER[ranks], ranks)
    for _, sent, _, held, units, _ in (found[name] for found in sharded(ranks)):
        per_step = sent_bytes(units, scheme, levels, "fp32", "fp32", 1, is_clipped=True)
        for first in range(2 * EVERY - 1, STEPS - EVERY + 1):  # any period after the first arrival
            counted = {key: sum(step.get(key, 0) for step in sent[first : first + EVERY]) for key in per_step}
            assert counted == {key: EVERY * value for key, value in per_step.items()}
        states = state_bytes(units, scheme, levels, "fp32", "fp32", 1, "gloo")
        assert {kind: held.get(kind, 0) for kind in states} == states
        assert ("in_flight" in states) == (scheme.sync.delay > 0)


@pytest.mark.parametrize(("ranks", "name"), CASES)
def test_a_fragments_bytes_are_counted_in_the_step_in_which_it_arrives(ranks: int, name: str) -> None:
    scheme, levels = SCHEMES[name], Levels.fit(INNER[ranks], ranks)
    sync = scheme.sync
    for _, sent, _, _, units, _ in (found[name] for found in sharded(ranks)):
        for step in range(2 * EVERY, STEPS):
            place = step % EVERY + 1
            fragment = sync.arrives(place) if sync.delay else sync.starts(place)
            expected: Counter[tuple[str, str, str]] = Counter()
            for unit, numel in enumerate(units):
                for one in transfers(numel, unit == 0, scheme, levels, "fp32", "fp32"):
                    if one.collective.every == "sync" and sync.fragment_of(unit) == fragment:
                        expected[one.hop.level, one.collective.name, one.wire] += one.sent_bytes
            exchanged = {
                key: n for key, n in sent[step].items() if key[1] in ("sync_reduce", "anchor_gather")
            }
            assert exchanged == expected


class Clock:
    """The lanes' clock, which goes on by a tick a reading, and by HELD_S while the exchange is held up."""

    def __init__(self, lanes: lane.Lanes) -> None:
        self.is_waited_for = threading.Event()
        self._lanes, self._ticks, self._held_s = lanes, itertools.count(), 0.0

    def perf_counter(self) -> float:
        now = TICK_S * next(self._ticks) + self._held_s
        if self._lanes._is_exchanging and threading.current_thread() is threading.main_thread():
            self.is_waited_for.set()
        return now

    def hold_up(self) -> None:
        """In a lane: whatever comes behind begins once an exchange is waited for."""
        self.is_waited_for.wait(60)
        self._held_s += HELD_S


TICK_S, HELD_S = 1e-6, 1.0


def train_while_the_exchange_is_held_up(inner: dict[str, int]):
    """Steps with the lane of the outer links blocked from an exchange's start to its arrival."""
    topology, late = lowband.Topology(inner), Sync(**NESTEROV | {"every": 4}, delay=3)
    model = GPT(SPEC, seed=7)
    lowband.shard(model, Scheme(name="late", **ZERO3, sync=late), topology, Block, torch.float32)
    engine, optimizer, losses, exposed = engine_of(model), optimizer_of(model.parameters()), [], []
    clock = lane.time = Clock(engine.lanes)
    for step in range(8):
        if step == 3:  # its end starts the exchange
            engine.lanes._threads["world"].submit(clock.hold_up)
        engine.lanes.take_times()
        loss = model(*part_of_batch(step, 0, dist.get_rank(), dist.get_world_size(), 1))
        loss.backward()
        lowband.clip_grad_norm_(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        times = engine.lanes.take_times()
        exposed.append(times.exchange_s)
        assert times.exchange_s <= times.exposed_s
        assert clock.is_waited_for.is_set() == (step >= 6)  # the end of step 6 waits for it
    return losses, exposed


def test_an_exchange_that_takes_long_holds_up_nothing_until_it_must_arrive() -> None:
    for losses, exposed in on_ranks(4, train_while_the_exchange_is_held_up, INNER[4], time_limit_s=200):
        assert len(losses) == 8
        assert [seconds > 0 for seconds in exposed] == [False] * 6 + [True, False]
        assert HELD_S < exposed[6] < 1.1 * HELD_S


def run(folder: Path, scheme: Scheme, **options) -> RunFolder:
    path = spec_file(folder, ranks=4, scheme=scheme.model_dump(), **options)
    code, error = ended(begun(path), path)
    assert code == 0, error
    return RunFolder(folder)


@pytest.mark.parametrize("device", ["auto", "fake"])
def test_a_run_records_bytes_memory_and_what_it_waited(tmp_path: Path, device: str) -> None:
    scheme = Scheme(name="late", **ZERO3, sync=Sync(**NESTEROV, delay=2, mix=0.5))
    folder = run(tmp_path, scheme, steps=6, device=device)
    spec, outcome = RunSpec.read_json(folder.spec), Outcome.read_json(folder.outcome)
    units = unit_numels(spec.model, spec.levels)
    expected = sent_bytes(units, scheme, spec.levels, "fp32", "fp32", 1, is_clipped=device == "auto")
    assert {(s.level, s.collective, s.wire): s.bytes for s in outcome.sent} == pytest.approx(expected)
    states = state_bytes(
        units, scheme, spec.levels, "fp32", "fp32", 1, "gloo" if device == "auto" else "fake"
    )
    held = {state.kind: state.bytes for state in outcome.states}
    assert {kind: held.get(kind, 0) for kind in states} == states
    if device == "auto":
        waited = [step.exposed_sync_time_s for step in folder.read_steps()]
        assert [bool(seconds) for seconds in waited] == [False] * 4 + [True, False]


def test_a_run_of_one_period_is_refused_in_one_line() -> None:
    scheme = CONFIG.scheme("diloco").model_copy(update={"sync": Sync(**NESTEROV, delay=1)})
    [given, *_] = CONFIG.runs(["smoke"])
    with pytest.raises(UserError) as error:
        RunSpec.parse({**given.model_dump(), "scheme": scheme.model_dump(), "steps": 3}, "spec.json")
    assert "steps (3) are one period of scheme 'diloco'" in str(error.value)
    assert "(allowed: multiples of 3 from 6)" in str(error.value)
