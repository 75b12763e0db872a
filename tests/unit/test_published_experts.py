"""Printed numbers of MegaBlocks and DeepEP beside predictions."""

from itertools import pairwise

import numpy as np
import pytest

from lowband.cost.experts import hit
from lowband.evidence.validation import fsmoe
from lowband.evidence.validation.published_experts import (
    FP8_ROW,
    SHAPES,
    _gpt,
    _network,
    bandwidth,
    latency_s,
    published_experts,
)
from lowband.spec.csv_tables import read_published
from tests.checkout import CONFIG


def test_shapes_have_the_printed_parameters() -> None:
    found = {size: round(_gpt(f"MoE-{size}").parameters / 1e9, 3) for size in SHAPES}
    assert found == {"XS": 0.839, "Small": 3.693, "Medium": 13.041}


def test_what_is_printed_is_predicted() -> None:
    found = published_experts(CONFIG)
    counted = found.groupby("quantity")["off_percent"].agg(lambda off: off.abs().max())
    assert counted["parameters"] < 0.1
    assert counted["FLOPs of a sequence"] < 1
    assert counted["largest micro-batch"] == 0
    assert len(found) == 6 + 2 + 8 + 12 + 4 * 3


def test_exchanges_by_hand() -> None:
    """Two nodes: of 4,096 tokens those with an expert in the other; of 128 all pairs, rank by rank."""
    network = _network(CONFIG, 50.0)
    assert FP8_ROW == 7168 + 56 * 4
    world, node = float(network.rate("world")), float(network.rate("node"))
    sent = 4096 * FP8_ROW * float(hit(256, 8, 2))
    seconds = network.base_s + network.latency_s("world") + sent / world
    assert bandwidth(network, 16, "dispatch", "world") == pytest.approx(sent / seconds)
    row = 128 * 8 * 7168 * 2 / 16
    flat = 7 * (row / node + network.latency_s("node")) + 8 * (row / world + network.latency_s("world"))
    assert latency_s(network, 16, "combine") == pytest.approx(network.base_s + flat)


# ---- FSMoE


def lines_of(read: str) -> dict[str, tuple[float, float]]:
    reported = read_published(CONFIG.root / "results" / "reported" / "14_experts.csv")
    return fsmoe.read_as(fsmoe.lines(reported), read)


def test_fsmoes_layers_are_all_of_table_4() -> None:
    of = fsmoe.layers()
    assert len(of.tokens) * 3 == 1458  # three numbers of heads each
    assert (of.tokens.min(), of.tokens.max(), of.width.max()) == (512, 8192, 16384)


@pytest.mark.parametrize("reading", fsmoe.READINGS)
def test_fsmoes_schedules_are_in_the_printed_order(reading: str) -> None:
    of = fsmoe.layers()
    times = [*fsmoe.times_ms(of, lines_of(reading)).values()]
    assert [*fsmoe.times_ms(of, lines_of(reading))] == [*fsmoe.SCHEDULES]
    assert all((later <= earlier * (1 + 1e-12)).all() for earlier, later in pairwise(times))
    means = [float((times[0] / each).mean()) for each in times]
    assert means == sorted(set(means))


def test_fsmoes_speedups_by_both_readings() -> None:
    found = published_experts(CONFIG).query("quantity == 'mean speedup over Tutel'")
    off = found.groupby("use")["off_percent"].agg(lambda off: off.abs().max())
    assert off["slopes: as printed"] < 3
    assert 15 < off["slopes: gather's slope / 10"] < 18  # not met


def test_what_the_suspect_slopes_say_of_table_2() -> None:
    """Mixtral on testbed A: 26.45 ms for the gradients of attention with 8 of 32 keys, a GPU's eighth; 12.3
    and 13.7 ms for gathers and reductions of experts and of attention, of equally many values."""
    alpha, beta = lines_of("as printed")["sum"]
    assert alpha + beta * (2 * 4096**2 + 2 * 4096 * 1024) / 8 == pytest.approx(26.45, rel=1e-3)
    values = 4 * 1024 * 4096 * (2 * 1.2 + 1)
    for name, printed in (("gather", 12.3), ("reduce", 13.7)):
        alpha, beta = lines_of("gather's slope / 10")[name]
        assert 2 * alpha + beta * values == pytest.approx(printed, rel=0.15)


def test_fsmoe_by_hand() -> None:
    """One layer with exchanges of 1 ms whatever they send and almost free products: one chunk is best,
    and only the sum of gradients can be hidden, behind attention's exchanges."""
    free = dict.fromkeys(("a2a", "gather", "reduce", "sum"), (1.0, 0.0))
    one = fsmoe.Layers(*(np.array([[each]]) for each in (1, 1, 1, 1, 1.0, 2)))
    found = {name: float(each[0]) for name, each in fsmoe.times_ms(one, free).items()}
    products = 2 * fsmoe.PRODUCT[0]
    dense = 2 * 2 + 18 * fsmoe.PRODUCT[0]
    experts = 2 * 4 + products + 2 * products
    assert found["Tutel-Improved"] == pytest.approx(dense + experts)
    assert found["Tutel (PipeMoE)"] == pytest.approx(dense + experts + 1)
    assert found["FSMoE"] == pytest.approx(dense + experts)
