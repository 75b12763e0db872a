"""What the engine counts equals the closed forms: bytes sent per level and collective, bytes per state."""

from itertools import product

import pytest
import torch
import torch.distributed as dist
from test_parity import CLIP, CONFIG, SCHEMES, SPEC, optimizer_of, part_of_batch

import lowband
from lowband.cost.bytes import sent_bytes, unit_numels
from lowband.cost.memory import state_bytes
from lowband.engine.api import engine_of
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels

DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}


def count(scheme_name: str, inner: dict[str, int], dtype: str, accumulation: int):
    """Bytes sent in the second step (the first has no new weights to fetch), bytes held, unit sizes."""
    model = lowband.shard(GPT(SPEC), CONFIG.scheme(scheme_name), lowband.Topology(inner), Block, DTYPE[dtype])
    engine = engine_of(model)
    optimizer = optimizer_of(model.parameters())
    for step in range(2):
        engine.ledger.take()
        for micro in range(accumulation):
            engine.sync = micro == accumulation - 1
            model(
                *part_of_batch(step, micro, dist.get_rank(), dist.get_world_size(), accumulation)
            ).backward()
        lowband.clip_grad_norm_(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()
    sent = {(s.level, s.collective, s.wire): s.bytes for s in engine.ledger.take()}
    moments = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.ndim)
    return sent, dict(engine.meter.peak), moments, [u.layout.numel for u in engine.units]


CASES = list(product(("fp32", "bf16"), (1, 2)))


def count_cases(scheme_name: str, inner: dict[str, int]):
    return [count(scheme_name, inner, dtype, accumulation) for dtype, accumulation in CASES]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_counts_equal_closed_forms(scheme: str, ranks: int) -> None:
    inner = {"package": 2, "node": 4}
    levels = Levels.fit(inner, ranks)
    units = unit_numels(SPEC, levels)
    row = CONFIG.scheme(scheme)
    for counted in on_ranks(ranks, count_cases, scheme, inner):
        for (dtype, accumulation), (sent, held, moments, numels) in zip(CASES, counted, strict=True):
            assert numels == units
            assert sent == sent_bytes(units, row, levels, dtype, "fp32", accumulation, True)
            held["optim"] += moments
            expected = state_bytes(units, row, levels, dtype, "fp32", accumulation, "gloo")
            assert {state: held.get(state, 0) for state in expected} == expected
