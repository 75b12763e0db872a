"""Printed numbers of MegaBlocks and DeepEP beside predictions."""

from pathlib import Path

import pytest

from lowband.cost.experts import hit
from lowband.evidence.validation.published_experts import (
    FP8_ROW,
    SHAPES,
    _gpt,
    _network,
    bandwidth,
    latency_s,
    published_experts,
)
from lowband.spec.config import Config

CONFIG = Config(Path(__file__).parents[2])


def test_shapes_have_the_printed_parameters() -> None:
    found = {size: round(_gpt(f"MoE-{size}").parameters / 1e9, 3) for size in SHAPES}
    assert found == {"XS": 0.839, "Small": 3.693, "Medium": 13.041}


def test_what_is_printed_is_predicted() -> None:
    found = published_experts(CONFIG)
    counted = found.groupby("quantity")["off_percent"].agg(lambda off: off.abs().max())
    assert counted["parameters"] < 0.1
    assert counted["FLOPs of a sequence"] < 1
    assert counted["largest micro-batch"] == 0
    assert len(found) == 6 + 2 + 8 + 12


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
