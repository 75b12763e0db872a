"""Flat collectives, one ring over all ranks, in steps and runs: values of hops, counts, links and buffers."""

from collections import Counter
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from modules import INNER, Tower, inputs, is_layer, sgd
from named import SCHEMES, Topologies, levels_of
from started import run
from test_parity import CLIP, optimizer_of
from torch import nn

import lowband
from lowband.cost.bytes import sent_bytes, unit_numels
from lowband.cost.memory import state_bytes
from lowband.engine.passes.engine import engine_of
from lowband.engine.transport import gloo
from lowband.engine.transport.topology import Topology
from lowband.errors import UserError
from lowband.evidence.tables.collect import collect
from lowband.run import count_fake
from lowband.run.count_calls import level_of
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import SELF, WORLD, Levels
from lowband.spec.records import Outcome, by_row, mean
from lowband.spec.tiers import at
from tests.checkout import CONFIG
from tests.pairwise import pairwise
from tests.refused import answer


def train(
    make,
    scheme: str,
    pattern: str,
    topology: Topology,
    dtype: torch.dtype,
    overlap: bool = True,
    passes: int = 1,
):
    """Two steps; what was sent in the second, what was held, unit sizes."""
    model = lowband.shard(
        make(), CONFIG.scheme(scheme), topology, is_layer, dtype, overlap=overlap, collectives=pattern
    )
    engine, optimizer, seen = engine_of(model), optimizer_of(model.parameters()), []
    for step in range(2):
        engine.ledger.take()
        for micro in range(passes):
            engine.sync = micro == passes - 1
            loss = model(inputs(step + 2 * micro, topology.rank)).square().mean() / passes
            loss.backward()
            seen.append(loss.item())
        seen.append(float(lowband.clip_grad_norm_(model, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
    sent = by_row(engine.ledger.take())
    held = dict(engine.meter.peak)
    held[at("optim", CONFIG.scheme(scheme).optim_tier)] += sum(
        t.nbytes for s in optimizer.state.values() for t in s.values() if t.ndim
    )
    return sent, held, [unit.layout.numel for unit in engine.units], seen, lowband.full_state_dict(model)


def two_units() -> nn.Module:
    """Small and odd: on 8 ranks most of the root's shards are padding."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 31), nn.Linear(31, 17)))


def count_all(schemes: list[str], inner: dict[str, int], pattern: str):
    topologies = Topologies(inner)
    return {
        scheme: train(two_units, scheme, pattern, topologies.of(scheme), torch.float32)[:3]
        for scheme in schemes
    }


COUNTED = [
    (1, INNER, SCHEMES),
    (2, INNER, SCHEMES),
    pytest.param(4, INNER, SCHEMES, marks=pytest.mark.wide),
    (8, INNER, ["hier3", "zero3"]),
    pytest.param(8, INNER, SCHEMES, marks=pytest.mark.wide),
    pytest.param(6, {"package": 3, "node": 3}, SCHEMES, marks=pytest.mark.wide),
]


@pytest.mark.parametrize(("ranks", "inner", "schemes"), COUNTED)
def test_counts_equal_closed_forms(ranks: int, inner: dict[str, int], schemes: list[str]) -> None:
    """Those of each rank, and their mean. With packages of 3 ranks it is not whole."""
    by_rank = on_ranks(ranks, count_all, schemes, inner, "flat")
    for name in schemes:
        scheme, totals = CONFIG.scheme(name), Counter()
        levels = Levels.fit(levels_of(name, inner), ranks)
        for rank, counted in enumerate(by_rank):
            sent, held, units = counted[name]
            assert sent == sent_bytes(units, scheme, levels, "fp32", "fp32", 1, True, "flat", rank)
            expected = state_bytes(units, scheme, levels, "fp32", "fp32", 1, "gloo", "flat")
            assert {state: held.get(state, 0) for state in expected} == expected
            totals.update(sent)
        assert sent_bytes(units, scheme, levels, "fp32", "fp32", 1, True, "flat") == {
            key: mean(total, ranks) for key, total in totals.items()
        }


def train_in_all_ways(schemes: list[str]):
    """Accumulated and clipped; in fp32, and in bf16 without overlap."""
    topology = Topology(INNER)
    return {
        (scheme, overlap): [
            train(Tower, scheme, pattern, topology, dtype, overlap, passes=2)[3:]
            for pattern in ("flat", "hops")
        ]
        for scheme in schemes
        for dtype, overlap in ((torch.float32, True), (torch.bfloat16, False))
    }


@pytest.mark.parametrize("ranks", [2, 4])
def test_training_agrees_with_hops(ranks: int) -> None:
    """Losses and norms to 1e-5 in fp32 and 1e-2 in bf16; on 2 ranks, where sums have one order, exactly."""
    for found in on_ranks(ranks, train_in_all_ways, ["ddp", "hier3-exact"]):
        for (_, in_fp32), ((seen, weights), (seen_of_hops, weights_of_hops)) in found.items():
            assert seen == pytest.approx(seen_of_hops, rel=1e-5 if in_fp32 else 1e-2)
            if ranks == 2:
                assert seen == seen_of_hops
                assert all(torch.equal(weights[key], weights_of_hops[key]) for key in weights)


def links_of_messages(scheme: str, inner: dict[str, int], pattern: str):
    """Bytes of a step by level, counted at gloo: sent to the rank that truly gets them."""
    topology, seen, send = Topology(inner), Counter(), dist.isend

    def isend(tensor, partner, **options):
        seen[level_of((topology.rank, partner), topology.levels)] += tensor.nbytes
        return send(tensor, partner, **options)

    gloo.dist.isend = isend
    model = lowband.shard(
        Tower(), CONFIG.scheme(scheme), topology, is_layer, torch.bfloat16, collectives=pattern
    )
    seen.clear()
    model(inputs(0, topology.rank)).backward()
    counted = Counter()
    for sent in engine_of(model).ledger.take():
        counted[sent.level] += sent.bytes
    return seen, +counted


@pytest.mark.parametrize(
    ("scheme", "pattern"), pairwise(product(("zero3", "hier3"), ("flat", "joined")), size=1)
)
def test_bytes_are_counted_on_the_links_that_they_take(scheme: str, pattern: str) -> None:
    for ranks, inner in ((8, INNER), (6, {"package": 3, "node": 3})):
        levels = set()
        for seen, counted in on_ranks(ranks, links_of_messages, scheme, inner, pattern):
            assert seen == counted
            levels |= seen.keys()
        assert levels == {hop.level for hop in Levels.fit(inner, ranks).hops(SELF, WORLD)}


def train_and_resume(folder: str, pattern: str) -> list[dict[str, torch.Tensor]]:
    """Final weights of two steps with recomputed layers; the second time from a checkpoint of the first."""
    topology, found = Topology(INNER), []
    for is_resumed in (False, True):
        model = lowband.shard(
            Tower(checkpointing=True), CONFIG.scheme("zero3"), topology, is_layer, torch.float32,
            collectives=pattern,
        )  # fmt: skip
        optimizer = sgd(model.parameters())
        checkpointer = lowband.Checkpointer(Path(folder))
        if is_resumed:
            checkpointer.load_newest(model, optimizer)
        for step in range(int(is_resumed), 2):
            model(inputs(step, topology.rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 0:
                checkpointer.save(1, model, optimizer, {})
                checkpointer.wait()
        found.append(lowband.full_state_dict(model))
    return found


@pytest.mark.parametrize("pattern", ["flat", "joined"])
def test_recomputed_and_resumed(tmp_path: Path, pattern: str) -> None:
    (through, resumed), *_ = on_ranks(4, train_and_resume, str(tmp_path), pattern)
    assert through.keys() == resumed.keys() != set()
    assert all(torch.equal(through[key], resumed[key]) for key in through)


def groups_of(pattern: str) -> int:
    topology = Topology(INNER)
    before = len(dist.distributed_c10d._world.pg_names)
    lowband.shard(Tower(), CONFIG.scheme("hier3-exact"), topology, is_layer, collectives=pattern)
    return len(dist.distributed_c10d._world.pg_names) - before


def test_groups_are_created_where_they_are_needed() -> None:
    """Rings over a node, over packages and over all ranks, each with two groups of gloo."""
    assert on_ranks(8, groups_of, "hops") == [0] * 8
    assert on_ranks(8, groups_of, "flat") == [6] * 8


def differing() -> str:
    mine = "flat" if dist.get_rank() else "hops"
    return answer(lambda: lowband.shard(Tower(), "zero3", Topology({}), is_layer, collectives=mine))


def test_ranks_that_differ_and_unknown_values_are_refused() -> None:
    for text in on_ranks(2, differing):
        assert "differs from rank 0 in collectives: flat, not hops" in text
    with pytest.raises(UserError, match=r"unknown collectives 'ring' .allowed: hops, flat, joined"):
        lowband.shard(Tower(), "zero3", None, is_layer, collectives="ring")


# ---- runs


def test_a_run_records_the_mean_over_ranks(tmp_path: Path) -> None:
    folder = run(tmp_path, run_id="smoke-gpt-200k-zero3-n0004-b2-s64-r1", collectives="flat", steps=3)
    levels = {sent.level for sent in Outcome.read_json(folder.outcome).sent}
    assert levels == {"package", "node"}
    collect([tmp_path], tmp_path / "tables")
    for name in ("bytes", "states"):
        rows = (tmp_path / "tables" / f"{name}.csv").read_text().splitlines()
        assert len(rows) > 5
        place = rows[0].split(",").index("difference_bytes")
        assert {row.split(",")[place] for row in rows[1:]} - {""} <= {"0", "0.0"}


def counted_at_scale():
    dist.destroy_process_group()  # the test's own
    [spec] = [spec for spec in CONFIG.runs(["volume"]) if spec.scheme.name == "zeropp"]
    model = spec.model.model_copy(update={"layers": 1, "hidden": 96, "heads": 2, "vocab": 50, "seq_len": 8})
    spec = spec.model_copy(update={"model": model, "seq_len": 8, "collectives": "flat"})
    outcome = count_fake.count(spec)
    dist.init_process_group("fake", store=count_fake.FakeStore(), rank=0, world_size=1)  # for its barrier
    return spec, outcome


def test_counted_at_scale_equals_closed_forms() -> None:
    """On 384 ranks: a plain and an INT8 gather are flat, an INT4 reduction is not."""
    [(spec, outcome)] = on_ranks(1, counted_at_scale)
    units = unit_numels(spec.model, spec.levels)
    sent = by_row(outcome.sent)
    assert sent == sent_bytes(units, spec.scheme, spec.levels, "bf16", "bf16", 1, False, "flat")
    held = {state.kind: state.bytes for state in outcome.states}
    expected = state_bytes(units, spec.scheme, spec.levels, "bf16", "bf16", 1, "fake", "flat")
    assert {kind: held.get(kind, 0) for kind in expected} == expected
