"""Printed numbers of papers on states beyond the device, beside predictions; tables of evictions."""

import pytest

from lowband.evidence.validation import eviction
from lowband.evidence.validation.published_tiers import published_tiers
from tests.checkout import CONFIG


def test_every_printed_number_has_a_prediction_and_its_distance() -> None:
    found = published_tiers(CONFIG)
    assert found.groupby("quantity").size().to_dict() == {
        "largest model": 4, "throughput": 4, "speedup over 64 GPUs": 3,
        "step on NVMe": 9, "traffic, times the model": 1,
    }  # fmt: skip
    assert (found["predicted"] > 0).all()
    off = found.set_index("setting")["off_percent"]
    assert off["largest model on one DGX-2, above"] == off["largest model, 1 GPU, above"] == 0
    assert off["largest model, 8 A100 + 1TB host"] == pytest.approx(-9, abs=1)
    faster = found[found["quantity"] == "speedup over 64 GPUs"]
    assert faster["off_percent"].abs().max() < 15
    assert (faster["predicted"] > [2, 4, 8]).all()  # more than in proportion, as printed
    disk = found[found["quantity"] == "step on NVMe"]
    assert disk.groupby("use").size().to_dict() == {"fitted": 2, "held out": 7}
    assert disk.loc[disk["use"] == "fitted", "off_percent"].abs().max() < 1e-9
    assert disk.loc[disk["use"] == "held out", "off_percent"].abs().median() < 15


def test_next_use_is_at_the_least_for_equal_chunks_and_near_it_otherwise() -> None:
    found = eviction.eviction_gaps().set_index(["kind", "rule"])
    ours = found.xs("next use", level="rule")
    assert ours.loc["equal chunks", "at_the_least"] == eviction.CASES
    assert (
        ours["mean_over_percent"].max()
        < 3
        < found.xs("least recent", level="rule")["mean_over_percent"].min()
    )
    assert (found["mean_over_percent"] >= 0).all()


def test_a_step_in_steady_state_fetches_what_the_bound_says() -> None:
    found = eviction.eviction_steps()
    ours = found[found["rule"] == "next use"]
    assert (ours["fetches"] == ours["bound"]).all()
    assert (found["fetches"] >= found["bound"]).all()


def test_swaps_differ_by_two_orders_of_magnitude_and_are_counted() -> None:
    found = eviction.eviction_swaps()
    assert (found["virtual"] == found["counted"]).all()
    assert found["times"].max() > 100
    large = found[(found["ranks"] == 1) & (found["micro_batches"] == 32)]["times"].iloc[0]
    assert large == pytest.approx((4 * 32 + 2) / 3, rel=0.02)  # per layer, where there are many
