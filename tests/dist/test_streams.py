"""No race between the engine's streams, by the model of `streams`; it finds some where a fault is put in."""

import re
from collections import Counter
from contextlib import nullcontext
from itertools import product

import pytest
import torch
import torch.distributed as dist
from modules import INNER, Tower, inputs, is_layer
from named import SCHEMES, levels_of
from streams import Device, Watch
from test_parity import SPEC, optimizer_of, part_of_batch
from torch.testing._internal.distributed.fake_pg import FakeStore

import lowband
from lowband.engine.transport import lane
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme
from lowband.spec.sync import Sync
from tests.pairwise import pairwise

RANK, RANKS, STEPS = 3, 8, 3
MODULES = {
    "gpt": (lambda: GPT(SPEC, seed=7), Block, lambda step: part_of_batch(step, 0, RANK, RANKS, 1)),
    "checkpointed": (lambda: Tower(True, False), is_layer, lambda step: (inputs(step, RANK),)),
    "breadth": (lambda: GPT(SPEC, seed=7), Block, lambda step: part_of_batch(step, 0, RANK, RANKS, 1)),
    "reentrant": (lambda: Tower(True, True), is_layer, lambda step: (inputs(step, RANK),)),
}


def steps(module: str, scheme: str | Scheme, dtype: torch.dtype, pattern: str, collect) -> None:
    """Accumulated with and without no_sync, or breadth-first, clipped; an evaluation between; the whole
    weights at the end."""
    make, wrap, arguments = MODULES[module]
    topology = lowband.Topology(levels_of(scheme) if isinstance(scheme, str) else INNER)
    model = lowband.shard(make(), scheme, topology, wrap, dtype, collectives=pattern)
    optimizer = optimizer_of(model.parameters())
    for step in range(STEPS):
        if module == "breadth":
            lowband.accumulate(model, [arguments(step)] * 3, lambda each: model(*each))
        for is_last in (False, True) if module != "breadth" else ():
            with nullcontext() if is_last or step % 2 else lowband.no_sync(model):
                model(*arguments(step)).backward()
        lowband.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        collect()
        if step == STEPS // 2:
            with torch.no_grad():
                model(*arguments(step))
    lowband.full_state_dict(model)


def watched(
    module: str,
    scheme: str | Scheme,
    dtype: torch.dtype,
    forgotten: str = "",
    frees: str = "",
    pattern: str = "hops",
) -> Device:
    """The engine on NCCL's path, over torch's fake group of 8 ranks, with faults.

    forgotten: the kind of waits left out frees:     what is not kept until the caller has waited: what the
    `caller` frees, or what another `lane` reads
    """
    device = Device(lambda wait: kind_of(wait) == forgotten)
    device.stand_in()
    lane.InlineLanes = lambda levels: lane.StreamLanes(levels, torch.device("cpu"))  # what a GPU has
    submit, advance = lane.StreamLanes.submit, lane._advance
    if frees == "caller":
        lane.StreamLanes.submit = lambda self, levels, work, uses=(): submit(self, levels, work)
    if frees == "lane":
        lane._advance = lambda work, level, is_first: advance(work, level, is_first)[:0]
    with Watch(device):
        steps(module, scheme, dtype, pattern, device.collect)
    return device


def kind_of(wait: str) -> str:
    return re.sub(r" \d+", "", wait)


def look(*arguments) -> tuple[Counter[str], set[str], list[int]]:
    """Races, kinds of waits and numbers of accesses, in a process where torch.cuda is not itself any more."""
    dist.destroy_process_group()  # the helper's gloo group
    dist.init_process_group("fake", store=FakeStore(), rank=RANK, world_size=RANKS)
    device = watched(*arguments)
    return device.races, {kind_of(wait) for wait in device.waits}, list(device.accesses.values())


# Towers, whose blocks are checkpointed, in fp32 alone.
CASES = [*product(SCHEMES, ("checkpointed", "reentrant"), [torch.float32])]
CASES += product(SCHEMES, ("gpt", "breadth"), [torch.float32, torch.bfloat16])


@pytest.mark.parametrize(("scheme", "module", "dtype"), pairwise(CASES, size=1))
def test_no_two_streams_race(scheme: str, module: str, dtype: torch.dtype) -> None:
    [(races, _, accesses)] = on_ranks(1, look, module, scheme, dtype)
    assert races == {}
    assert len(accesses) > 1
    assert min(accesses) > 5  # breadth-first under ddp: one reduction per step and unit


@pytest.mark.parametrize("scheme", ["ddp", "zero3", "hier3-exact"])
def test_no_two_streams_race_in_flat_collectives(scheme: str) -> None:
    [(races, _, accesses)] = on_ranks(1, look, "gpt", scheme, torch.bfloat16, "", "", "flat")
    assert races == {}
    assert min(accesses) > 10


@pytest.mark.parametrize(
    ("beyond", "wire"), pairwise(product(("package", "node"), ("native", "int8")), size=1)
)
def test_no_two_streams_race_while_replicas_exchange_behind_training(beyond: str, wire: str) -> None:
    outer = {"outer": "nesterov", "momentum": 0.9}
    sync = Sync(beyond=beyond, every=2, fragments=2, delay=2, mix=0.5, **outer)
    inside = {"weights": "package", "grads": "package", "optim": "package"}
    scheme = Scheme(name="late", **inside, sync=sync, sync_reduce=wire)
    [(races, _, accesses)] = on_ranks(1, look, "gpt", scheme, torch.bfloat16)
    assert races == {}
    assert min(accesses) > 5


@pytest.mark.parametrize("scheme", ["zero3", pytest.param("hier3", marks=pytest.mark.wide)])
def test_every_kind_of_wait_is_needed(scheme: str) -> None:
    [(_, kinds, _)] = on_ranks(1, look, "gpt", scheme, torch.bfloat16)
    assert kinds == {"caller waits for stream", "stream waits for caller", "stream waits for stream"}
    for kind in kinds:
        [(races, _, _)] = on_ranks(1, look, "gpt", scheme, torch.bfloat16, kind)
        assert races, kind


@pytest.mark.parametrize("scheme", ["zero3", "hier3"])
def test_gradients_must_be_held_until_the_lane_has_read_them(scheme: str) -> None:
    [(races, _, _)] = on_ranks(1, look, "gpt", scheme, torch.float32, "", "caller")
    assert any(race.startswith("an allocation on caller takes") for race in races)


@pytest.mark.parametrize("scheme", ["zero3", "hier3"])
def test_what_one_lane_makes_must_be_held_until_another_has_read_it(scheme: str) -> None:
    [(races, _, _)] = on_ranks(1, look, "gpt", scheme, torch.float32, "", "lane")
    assert any(race.startswith("an allocation on stream") for race in races)
