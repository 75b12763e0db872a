"""What copies of popular experts spare: by hand, at its ends, and beside what ranks drew."""

from itertools import pairwise

import pandas as pd
import pytest

from lowband.cost.popular import with_copies
from tests.checkout import REFERENCE

ROUTES = REFERENCE / "routes" / "routes.csv"


def test_by_hand() -> None:
    """Of four experts on a rank each the first has 7/10 of pairs, and its copy half of these. By Zipf's law
    with 2^-s + 3^-s + 4^-s = 3/7 the second has 7/10 2^-s, with eight experts on four ranks likewise."""
    assert with_copies(4, 1, 4, 2, 0, 2.8) == (2.8, 1.0)
    assert with_copies(4, 1, 4, 2, 1, 2.8) == (pytest.approx(4 * 0.7 / 2), pytest.approx(0.3))
    load, crossing = with_copies(4, 1, 4, 4, 1, 2.8)  # on every rank: now the second's has most
    s = next(s for s in (i / 1e5 for i in range(400_000)) if 2**-s + 3**-s + 4**-s < 3 / 7)
    assert load == pytest.approx(max(4 * 0.7 * 2**-s, 1), rel=1e-3)
    assert crossing == pytest.approx(0.3)
    assert with_copies(8, 1, 4, 2, 1, 4 * (0.7 + 0.3 / 7))[0] == pytest.approx(4 * (0.35 + 0.3 / 7))


def test_at_its_ends() -> None:
    assert with_copies(8, 2, 4, 2, 2, 1.0) == (1.0, 1.0)  # equally popular: none has more than the mean
    assert with_copies(8, 8, 4, 2, 1, 3.0) == (3.0, 1.0)  # each token goes to all, whatever is said of loads
    of_copies = [with_copies(16, 2, 8, 4, copies, 2.0) for copies in range(17)]
    for (load, crossing), (then, later) in pairwise(of_copies):
        assert 1 <= then <= load
        assert later <= crossing
    assert of_copies[4] < of_copies[0]
    assert of_copies[16] == of_copies[8]  # no more have more than the mean


def test_beside_what_ranks_drew() -> None:
    """Of 64 experts on two nodes of 8 ranks four have copies; neither number is wrong by more than 13 %."""
    drawn = pd.read_csv(ROUTES).query("top_k == 2 and skew > 0")
    for _, rows in drawn.groupby("skew"):
        none, four = (rows[rows["copies"] == count][["load", "slow_rows"]].median() for count in (0, 4))
        load, crossing = with_copies(64, 2, 16, 2, 4, none["load"])
        assert 0.87 < load / four["load"] < 1
        assert 0.87 < crossing / (four["slow_rows"] / none["slow_rows"]) < 1
