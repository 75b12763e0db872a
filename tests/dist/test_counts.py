"""What the engine counts equals the closed forms: bytes sent per level and collective, bytes per state."""

from collections.abc import Sequence
from functools import cache
from itertools import product

import pytest
import torch
from named import SCHEMES, Topologies, levels_of
from test_parity import SPEC, optimizer_of, stepped

import lowband
from lowband.cost.bytes import sent_bytes, unit_numels
from lowband.cost.memory import state_bytes
from lowband.engine.passes.engine import engine_of
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from lowband.spec.records import by_row
from lowband.spec.tiers import at
from tests.checkout import CONFIG
from tests.pairwise import Case, covering

DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}
CASES = [*product(SCHEMES, (1, 2, 4, 8), DTYPE, (1, 2))]  # scheme, ranks, dtype, accumulation
FEW = covering(CASES)
# On 8 ranks those whose bytes have levels of their own; test_placements.py counts the others' there.
LEFT_OUT = {case for case in FEW if case[1] == 8 and not CONFIG.scheme(case[0]).machine_levels}
PARAMETERS = [
    case if case in FEW - LEFT_OUT else pytest.param(*case, marks=pytest.mark.wide) for case in CASES
]


def count_all(cases: Sequence[Case]):
    topologies = Topologies()
    return {
        case: count(scheme, topologies.of(scheme), dtype, accumulation)
        for case in cases
        for scheme, _, dtype, accumulation in [case]
    }


@cache
def counted(ranks: int, cases: Sequence[Case]) -> list[dict[Case, tuple]]:
    """Of each rank. Cases of as many ranks share a process group."""
    return on_ranks(ranks, count_all, cases, time_limit_s=400)


def count(scheme_name: str, topology: lowband.Topology, dtype: str, accumulation: int):
    """Bytes sent in the second step (the first has no new weights to fetch), bytes held, unit sizes."""
    model = lowband.shard(GPT(SPEC), CONFIG.scheme(scheme_name), topology, Block, DTYPE[dtype])
    engine = engine_of(model)
    optimizer = optimizer_of(model.parameters())
    for step, _ in enumerate(stepped(model, optimizer, 2, accumulation)):
        if step == 0:
            engine.ledger.take()
    sent = by_row(engine.ledger.take())
    moments = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if t.ndim)
    return sent, dict(engine.meter.peak), moments, [u.layout.numel for u in engine.units]


@pytest.mark.parametrize(("scheme", "ranks", "dtype", "accumulation"), PARAMETERS)
def test_counts_equal_closed_forms(scheme: str, ranks: int, dtype: str, accumulation: int) -> None:
    levels, case = Levels.fit(levels_of(scheme), ranks), (scheme, ranks, dtype, accumulation)
    given = unit_numels(SPEC, levels), CONFIG.scheme(scheme), levels, dtype, "fp32", accumulation
    together = tuple(each for each in CASES if each in FEW - LEFT_OUT and each[1] == ranks)
    together = together if case in together else (case,)
    for sent, held, moments, numels in (of_rank[case] for of_rank in counted(ranks, together)):
        assert numels == given[0]
        assert sent == sent_bytes(*given, True)
        held[at("optim", given[1].optim_tier)] += moments
        expected = state_bytes(*given, "gloo")
        assert {state: held.get(state, 0) for state in expected} == expected
