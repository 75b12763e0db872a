"""What the engine counts equals the closed forms: bytes sent per level and collective, bytes per state."""

from itertools import product

import pytest
import torch
from named import CONFIG, SCHEMES, levels_of
from test_parity import SPEC, optimizer_of, stepped

import lowband
from lowband.cost.bytes import sent_bytes, unit_numels
from lowband.cost.memory import state_bytes
from lowband.engine.passes.engine import engine_of
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from tests.pairwise import pairwise

DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def count(scheme_name: str, inner: dict[str, int], dtype: str, accumulation: int):
    """Bytes sent in the second step (the first has no new weights to fetch), bytes held, unit sizes."""
    model = lowband.shard(GPT(SPEC), CONFIG.scheme(scheme_name), lowband.Topology(inner), Block, DTYPE[dtype])
    engine = engine_of(model)
    optimizer = optimizer_of(model.parameters())
    for step, _ in enumerate(stepped(model, optimizer, 2, accumulation)):
        if step == 0:
            engine.ledger.take()
    sent = {(s.level, s.collective, s.wire): s.bytes for s in engine.ledger.take()}
    moments = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.ndim)
    return sent, dict(engine.meter.peak), moments, [u.layout.numel for u in engine.units]


@pytest.mark.parametrize(
    ("scheme", "ranks", "dtype", "accumulation"), pairwise(product(SCHEMES, (1, 2, 4, 8), DTYPE, (1, 2)))
)
def test_counts_equal_closed_forms(scheme: str, ranks: int, dtype: str, accumulation: int) -> None:
    inner = levels_of(scheme)
    levels = Levels.fit(inner, ranks)
    given = unit_numels(SPEC, levels), CONFIG.scheme(scheme), levels, dtype, "fp32", accumulation
    for sent, held, moments, numels in on_ranks(ranks, count, scheme, inner, dtype, accumulation):
        assert numels == given[0]
        assert sent == sent_bytes(*given, True)
        held["optim"] += moments
        expected = state_bytes(*given, "gloo")
        assert {state: held.get(state, 0) for state in expected} == expected
