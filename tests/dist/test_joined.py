"""Joined hops, one exchange between all ranks: the bits of hops and of a single process, and counts."""

import pytest
import torch
from named import INNER, levels_of
from test_flat import COUNTED, count_all
from test_parity import Case, Trained, single, train_sharded

from lowband.cost.bytes import sent_bytes
from lowband.cost.memory import state_bytes
from lowband.engine.transport.topology import Topology
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from tests.checkout import CONFIG

WIDE = pytest.mark.wide
RANKS = [
    (1, INNER), (2, INNER), (4, INNER), pytest.param(8, INNER, marks=WIDE),
    pytest.param(6, {"package": 3, "node": 3}, marks=WIDE),
]  # fmt: skip
EXACT = (("ddp", 2), ("zero3", 1), ("hier3-exact", 2))


def train_all(inner: dict[str, int]) -> tuple[dict[Case, Trained], list[Trained]]:
    """Joined, by case; and a quantized scheme, joined and in hops."""
    topology = Topology(inner)
    exact = {case: train_sharded(*case, topology, "joined") for case in EXACT}
    return exact, [train_sharded("hier3", 1, topology, way) for way in ("joined", "hops")]


@pytest.mark.parametrize(("ranks", "inner"), RANKS)
def test_bit_equal_to_hops_and_to_a_single_process(ranks: int, inner: dict[str, int]) -> None:
    """hier3's quantized reductions stay hops. The others' hops equal the single process (test_parity.py)."""
    exact, (joined, hops) = on_ranks(ranks, train_all, inner, time_limit_s=400)[0]
    assert joined[:2] == hops[:2]
    assert joined[2].keys() == hops[2].keys()
    assert all(torch.equal(joined[2][name], hops[2][name]) for name in hops[2])
    for case, (losses, norms, weights) in single(ranks, EXACT, **inner).items():
        assert exact[case][0] == pytest.approx(losses, rel=1e-6), case  # gloo adds them up in its own order
        assert exact[case][1] == pytest.approx(norms, rel=1e-12), case
        assert all(torch.equal(exact[case][2][name], weights[name]) for name in weights), case


@pytest.mark.parametrize(("ranks", "inner", "schemes"), COUNTED)
def test_counts_equal_closed_forms(ranks: int, inner: dict[str, int], schemes: list[str]) -> None:
    """Those of each rank, which are the mean."""
    for rank, counted in enumerate(on_ranks(ranks, count_all, schemes, inner, "joined")):
        for name in schemes:
            levels = Levels.fit(levels_of(name, inner), ranks)
            sent, held, units = counted[name]
            given = units, CONFIG.scheme(name), levels, "fp32", "fp32", 1
            assert sent == sent_bytes(*given, True, "joined", rank) == sent_bytes(*given, True, "joined")
            expected = state_bytes(*given, "gloo", "joined")
            assert {state: held.get(state, 0) for state in expected} == expected
