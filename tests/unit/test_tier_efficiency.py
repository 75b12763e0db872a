"""FLOPs per byte by counting what moves, the form's limits, and rates that ranks of a node share."""

import pytest

from lowband.cost.numbers import GIGA
from lowband.cost.tiers import Rates, efficiency, intensity
from lowband.evidence.report.figures import FIGURES
from lowband.evidence.validation.tier_efficiency import MAY, arrives, tier_efficiency
from lowband.spec.machine import Tier
from tests.checkout import CONFIG


def test_flops_per_byte_are_those_of_a_block_counted_by_hand() -> None:
    width, sequences, length = 256, 3, 128
    tokens, parameters = sequences * length, 12 * width * width
    flops = 4 * 2 * parameters * tokens  # forward, twice that backward, and the forward again
    passes_of_weights, bytes_of_16_bits = 3, 2
    weights = (passes_of_weights + 1) * bytes_of_16_bits * parameters  # and gradients leave once
    optimizer = 2 * (4 + 4 + 4 + 4) * parameters
    checkpoint = 2 * bytes_of_16_bits * tokens * width  # of one block, out and in
    assert intensity("weights", tokens, width) == flops / weights
    assert intensity("optimizer", tokens, width) == flops / optimizer
    assert intensity("activations", tokens, width) == flops / checkpoint
    assert intensity("activations", tokens, width, every=5) == 5 * flops / checkpoint


def test_efficiency_is_time_computing_over_time_computing_and_waiting() -> None:
    moved, worth, rate, peak = 7e9, 512.0, 3e9, 70e12
    computing, waiting = moved * worth / peak, moved / rate
    assert efficiency(worth, rate, peak) == pytest.approx(computing / (computing + waiting), rel=1e-12)
    assert efficiency(worth, 0.0, peak) == 0


def test_ranks_of_a_node_share_what_it_can() -> None:
    rate = {"source": "made up"}
    tier = Tier.model_validate(
        {
            "capacity_gib": 1, "source": "made up",
            "fetch_gigabytes_per_s": rate | {"value": 12, "low": 8},
            "stash_gigabytes_per_s": rate | {"value": 5},
            "node_fetch_gigabytes_per_s": rate | {"value": 48},
            "update_gigabytes_per_s": rate | {"value": 40},
            "node_update_gigabytes_per_s": rate | {"value": 64},
        }
    )  # fmt: skip
    assert Rates.of(tier, 1) == Rates(12, 5, 40)
    assert Rates.of(tier, 4) == Rates(12, 5, 16)
    assert Rates.of(tier, 16) == Rates(3, 5, 4)
    assert Rates.of(tier, 4, "low").fetch == 8


def test_the_table_has_what_zero_infinity_says_of_its_machine() -> None:
    """Section 4 and 5: weights may lie beyond the device even at a batch of one sequence if all ranks fetch
    their parts; the optimizer's states need more, and get it from many nodes; larger batches need less."""
    found = tier_efficiency(CONFIG)
    dgx2 = found[found["cluster"] == "dgx2"]
    cell = dgx2.set_index(["tier", "state", "nodes", "sequences"])["efficiency"]
    assert cell["host", "optimizer", 32, 2] > MAY > cell["host", "optimizer", 1, 2]
    assert cell["host", "activations", 1, 1] > cell["disk", "activations", 1, 1]
    grows = found.groupby(["cluster", "tier", "state", "nodes"])["efficiency"]
    assert grows.apply(lambda one: one.is_monotonic_increasing).all()
    assert found["efficiency"].between(0, 1).all()
    assert set(found["may_live"]) == {False, True}
    drawn = FIGURES["tier_efficiency"].rows(found)
    assert set(drawn["nodes"]) == {32} and set(drawn["tier"]) >= {"host", "disk"}


def test_weights_come_no_faster_than_the_links_gather_them() -> None:
    dgx2 = CONFIG.machine("dgx2")
    assert arrives(dgx2, "host", "weights", 1) == 48
    assert arrives(dgx2, "host", "weights", 32) == dgx2.link("world").gigabytes_per_s
    assert arrives(dgx2, "host", "optimizer", 32) == 32 * 48
    assert arrives(dgx2, "disk", "optimizer", 1) == 15  # its slower way, of all ranks together
    assert GIGA == 1e9
