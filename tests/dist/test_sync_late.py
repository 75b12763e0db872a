"""Exchanges between replicas that arrive later than they start, or of a part of the units: exactly what
several models in a single process do; bytes and memory as in closed form; anchors equal bit by bit.
"""

import itertools
import threading
from collections import Counter
from pathlib import Path

import pytest
import reference
import seldom
import torch
import torch.distributed as dist
from seldom import DDP, HIER3, ZERO3, Cases, Found, are_equal, checked_run, same_on_replicas
from started import MODEL
from test_parity import CLIP, SPEC, optimizer_of, part_of_batch
from test_sync import INNER
from torch import nn

import lowband
from lowband.cost.bytes import transfers
from lowband.engine.passes.engine import engine_of
from lowband.engine.transport import lane
from lowband.errors import UserError
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.run import RunSpec
from lowband.spec.scheme import Scheme
from lowband.spec.sync import Sync
from tests.checkout import CONFIG

EVERY, STEPS = 3, 10
NESTEROV = {"beyond": "node", "every": EVERY, "outer": "nesterov", "learning_rate": 0.7, "momentum": 0.9}
MOMENTUM = {"beyond": "node", "every": EVERY, "outer": "momentum", "momentum": 0.5}
SCHEMES = [
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
]
ON = {
    2: ("one late", "a period late", "fragments"),
    4: ("one late, mixed", "mixed at once", "fragments, late", "int4, late"),
    8: ("two late, ddp inside", "two outer levels", "fragments, late"),
}


def train(scheme: Scheme, topology: lowband.Topology) -> Found:
    model, found = seldom.train(scheme, topology, STEPS, replicas_are_equal)
    lowband.sync_replicas(model)
    found.seen.append(are_equal(model))
    assert not engine_of(model).meter.now["in_flight"]
    return found


def replicas_are_equal(model: nn.Module) -> bool:
    """Their weights; their anchors always are."""
    replicas = engine_of(model).replicas
    anchor = torch.cat([each.agreed()[0] for each in replicas.exchanges])
    assert same_on_replicas(anchor, engine_of(model).axis.levels.size(replicas.sync.beyond))
    return are_equal(model)


def reference_of(replicas: reference.Replicas):
    def unit_of(name: str) -> int:
        return int(name.split(".")[1]) + 1 if name.startswith("blocks.") else 0

    return reference.train_replicas(replicas, STEPS, unit_of)


CASES = Cases(SCHEMES, ON, INNER, train, reference_of, wide=(8,))


@pytest.mark.parametrize(("ranks", "name"), CASES.exact)
def test_bit_equal_to_several_models_in_one_process(ranks: int, name: str) -> None:
    CASES.check_bits(ranks, name)


@pytest.mark.parametrize(("ranks", "name"), CASES.all)
def test_replicas_are_equal_where_nothing_of_their_own_remains(ranks: int, name: str) -> None:
    sync = CASES.schemes[name].sync
    arrives = lambda t: t > sync.delay and (t - sync.delay) % EVERY == 0  # noqa: E731
    agree = not sync.mix and sync.fragments == 1
    arrivals = [agree and arrives(t) for t in range(1, STEPS + 1)]
    for found in CASES.found(ranks, name):
        assert found.seen == [*arrivals, True]  # the last by sync_replicas


@pytest.mark.parametrize(("ranks", "name"), CASES.all)
def test_bytes_and_memory_over_a_period_are_those_of_the_closed_forms(ranks: int, name: str) -> None:
    firsts = range(2 * EVERY - 1, STEPS - EVERY + 1)  # any period after the first arrival
    states, _ = CASES.check_bytes_and_memory(ranks, name, firsts)
    assert ("in_flight" in states) == (CASES.schemes[name].sync.delay > 0)


@pytest.mark.parametrize(("ranks", "name"), CASES.all)
def test_a_fragments_bytes_are_counted_in_the_step_in_which_it_arrives(ranks: int, name: str) -> None:
    scheme, levels = CASES.schemes[name], CASES.levels(ranks)
    sync = scheme.sync
    for found in CASES.found(ranks, name):
        for step in range(2 * EVERY, STEPS):
            place = step % EVERY + 1
            fragment = sync.arrives(place) if sync.delay else sync.starts(place)
            expected: Counter[tuple[str, str, str]] = Counter()
            for unit, numel in enumerate(found.units):
                for one in transfers(numel, unit == 0, scheme, levels, "fp32", "fp32"):
                    if one.collective.every == "sync" and sync.fragment_of(unit) == fragment:
                        expected[one.hop.level, one.collective.name, one.wire] += one.sent_bytes
            exchanged = {
                key: n for key, n in found.sent[step].items() if key[1] in ("sync_reduce", "anchor_gather")
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


@pytest.mark.parametrize("device", ["auto", "fake"])
def test_a_run_records_bytes_memory_and_what_it_waited(tmp_path: Path, device: str) -> None:
    scheme = Scheme(name="late", **ZERO3, sync=Sync(**NESTEROV, delay=2, mix=0.5))
    folder, _ = checked_run(tmp_path, scheme, device, ranks=4, steps=6, model=MODEL)
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
