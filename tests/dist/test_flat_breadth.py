"""Flat rings in breadth-first order: the losses of hops in that order, the bytes of the closed form."""

import pytest
import torch
import torch.distributed as dist
from test_parity import INNER, SPEC, part_of_batch

import lowband
from lowband.cost.bytes import sent_bytes, unit_numels
from lowband.engine.passes.engine import engine_of
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.records import by_row
from lowband.spec.step import Pattern
from tests.checkout import CONFIG

STEPS, MICRO_BATCHES = 2, 2
Counts = dict[tuple[str, str, str], int | float]


def train(scheme_name: str, pattern: Pattern) -> tuple[list[float], Counts, Counts]:
    """Losses by step; this rank's bytes of the last step, counted and in closed form."""
    topology, scheme = lowband.Topology(INNER), CONFIG.scheme(scheme_name)
    module = GPT(SPEC, seed=7)
    model = lowband.shard(module, scheme, topology, Block, torch.float32, collectives=pattern)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses: list[float] = []
    sent: Counts = {}
    for step in range(STEPS):
        place = dist.get_rank(), dist.get_world_size()
        parts = [part_of_batch(step, i, *place, MICRO_BATCHES) for i in range(MICRO_BATCHES)]
        engine_of(model).ledger.take()
        losses += [float(sum(lowband.accumulate(model, parts, lambda part: model(*part) / MICRO_BATCHES)))]
        sent = by_row(engine_of(model).ledger.take())
        optimizer.step()
        optimizer.zero_grad()
    closed = sent_bytes(
        unit_numels(SPEC, topology.levels), scheme, topology.levels, "fp32", "fp32", MICRO_BATCHES,
        is_clipped=False, pattern=pattern, rank=topology.rank, order="breadth",
    )  # fmt: skip
    return losses, _crossed(sent), _crossed(closed)


def _crossed(counts: Counts) -> Counts:
    """Without the levels that a rank's ring does not cross."""
    return {key: count for key, count in counts.items() if count}


def train_in_both_ways(scheme: str) -> list[tuple[list[float], Counts, Counts]]:
    return [train(scheme, pattern) for pattern in ("hops", "flat")]


@pytest.mark.parametrize(
    ("ranks", "scheme"),
    [
        (2, "hpz"),
        (4, "zeropp"),
        (4, "zero3"),
        *(pytest.param(8, name, marks=pytest.mark.wide) for name in ("zero3", "hier3")),
    ],
)
def test_rings_in_breadth_first_order(ranks: int, scheme: str) -> None:
    hops, flat = zip(*on_ranks(ranks, train_in_both_ways, scheme), strict=True)
    for (expected, *_), (losses, counted, closed) in zip(hops, flat, strict=True):
        assert losses == pytest.approx(expected, abs=1e-6)  # a ring adds up in another order
        assert counted == closed
    assert all(counted == closed for _, counted, closed in hops)
    by_level = [{level for level, *_ in counted} for _, counted, _ in flat]
    # The last rank's successor is across another level; quantized reductions go by hops over all levels.
    assert scheme != "zero3" or by_level[0] != by_level[-1]
