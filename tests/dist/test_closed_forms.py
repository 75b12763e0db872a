"""Bytes and memory of any placement on any levels, wires and unit sizes, hop by hop and flat, on any rank:
counted = closed form.

The engine runs on torch's fake process group, which sends nothing and knows any number of ranks.
"""

import torch
import torch.distributed as dist
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import lowband
from lowband.cost.bytes import sent_bytes
from lowband.cost.memory import state_bytes
from lowband.engine.passes.engine import engine_of
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from lowband.spec.records import by_row
from lowband.spec.scheme import Scheme
from lowband.spec.step import STEP, SYNC_SWAP
from lowband.spec.sync import Sync
from lowband.spec.tiers import DEVICE, HOST, at

DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}
OUTER = st.sampled_from([{}, {"outer": "momentum", "momentum": 0.5}, {"outer": "nesterov", "momentum": 0.9}])
WIRES = st.sampled_from(["native", "fp32", "bf16", "int8", "int4"])


@st.composite
def syncs(draw, beyond: str) -> Sync:
    every = draw(st.integers(1, 4))
    fragments = draw(st.sampled_from([n for n in range(1, every + 1) if every % n == 0]))
    delay = draw(st.integers(0, every))
    mix = 0.5 if delay == every else draw(st.sampled_from([0, 0.5]))
    return Sync(beyond=beyond, every=every, fragments=fragments, delay=delay, mix=mix, **draw(OUTER))


@st.composite
def placements(draw) -> tuple[dict[str, int], int, Scheme]:
    """Sizes of up to three inner levels, the number of ranks, a scheme that they can hold."""
    inner, size = {}, 1
    for i in range(draw(st.integers(0, 3))):
        size *= draw(st.integers(1, 3))
        inner[f"level{i}"] = size
    world = size * draw(st.integers(1, 3))
    names = Levels.fit(inner, world).names
    weights, grads, optim = sorted(draw(st.integers(0, len(names) - 1)) for _ in range(3))
    secondary = draw(st.integers(0, weights - 1)) if weights and draw(st.booleans()) else None
    beyond = draw(st.sampled_from(names[optim:]))
    sync = draw(syncs(beyond)) if beyond != "world" else None
    tier = DEVICE if sync else draw(st.sampled_from([DEVICE, HOST]))
    wires = {row.name: draw(WIRES) for row in STEP if row is not SYNC_SWAP}
    if tier != DEVICE:
        wires["update_gather"] = "native"
    scheme = Scheme(
        name="drawn",
        sync=sync,
        weights=names[weights],
        grads=names[grads],
        optim=at(names[optim], tier),
        secondary=None if secondary is None else names[secondary],
        block_size=draw(st.integers(1, 600)),
        **wires,
    )
    return inner, world, scheme


@seed(1)
@settings(max_examples=120, deadline=None, database=None)
@given(
    placement=placements(),
    widths=st.lists(st.integers(1, 40), min_size=2, max_size=4),
    dtype=st.sampled_from(["fp32", "bf16"]),
    reduce_dtype=st.sampled_from(["fp32", "bf16"]),
    accumulation=st.integers(1, 2),
    pattern=st.sampled_from(["hops", "flat", "joined"]),
    place=st.floats(0, 1, exclude_max=True),
)
def check(
    placement,
    widths: list[int],
    dtype: str,
    reduce_dtype: str,
    accumulation: int,
    pattern: str,
    place: float,
) -> None:
    inner, world, scheme = placement
    rank = int(place * world)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        model = nn.Sequential(
            nn.LayerNorm(5), *(nn.Sequential(nn.Linear(5, n), nn.Linear(n, 5)) for n in widths)
        )
        topology = lowband.Topology(inner)
        wrap = lambda module: isinstance(module, nn.Sequential) and module is not model  # noqa: E731
        lowband.shard(model, scheme, topology, wrap, DTYPE[dtype], DTYPE[reduce_dtype], collectives=pattern)
        engine, optimizer = engine_of(model), torch.optim.AdamW(model.parameters())
        for step in range(2 * scheme.period):  # in the first period less arrives
            if step == scheme.period:
                engine.ledger.take()
            for micro in range(accumulation):
                engine.sync = micro == accumulation - 1
                model(torch.ones(2, 5)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        sent = by_row(engine.ledger.take())
        units = [unit.layout.numel for unit in engine.units]
        levels = topology.levels
        expected = {
            key: round(scheme.period * value)
            for key, value in sent_bytes(
                units, scheme, levels, dtype, reduce_dtype, accumulation, False, pattern, rank
            ).items()
        }
        assert sent == expected, (sent, expected)
        held = dict(engine.meter.peak)
        held[at("optim", scheme.optim_tier)] *= 3  # Adam's moments
        states = state_bytes(units, scheme, levels, dtype, reduce_dtype, accumulation, "fake", pattern)
        counted = {kind: held.get(kind, 0) for kind in states}
        assert counted == states, (counted, states)
    finally:
        dist.destroy_process_group()


def check_all() -> None:
    dist.destroy_process_group()  # the test's own
    check()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)  # for the helper's last barrier


def test_counted_equals_closed_form() -> None:
    on_ranks(1, check_all)
