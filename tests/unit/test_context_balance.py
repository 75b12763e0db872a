"""Printed shares of the ideal beside the balance of pairs: which are met, and which are not."""

import pytest

from lowband.evidence.validation.context import context_balance
from tests.checkout import CONFIG


@pytest.fixture(scope="module")
def rows():
    return context_balance(CONFIG)


def test_a_ring_without_zigzag(rows) -> None:
    """8 / 15. One sequence: within 3 points; packed ones: one to four below."""
    ring = rows[rows["system"] == "ring"]
    assert ring["predicted"].to_numpy() == pytest.approx(100 * 8 / 15, rel=1e-12)
    assert list(ring.groupby("api").size()) == [2, 3]
    assert ring[ring["api"] == "batch"]["off"].between(-3, 3).all()
    assert ring[ring["api"] == "varlen"]["off"].between(0, 4.5).all()


def test_zigzag_has_the_ideals_balance(rows) -> None:
    """Printed are 72 to 90 % of it: what is missing are sends and smaller blocks, not balance."""
    assert set(rows[rows["system"] == "zigzag ring"]["predicted"]) == {100.0}
