"""Rows made of rows, as entries of tables and documents say it."""

import pandas as pd
import pytest

from lowband.evidence.tables.view import Other, View

STEPS = pd.DataFrame(
    {
        "ranks": [2, 2, 2, 2, 1, 1],
        "order": ["depth", "depth", "breadth", "breadth", "depth", "breadth"],
        "time_s": [4.0, 6.0, 2.0, None, 8.0, 4.0],
    }
)


def test_rows_are_kept_added_to_sorted_and_chosen() -> None:
    view = View(where="ranks == 2", add={"late": "time_s > 4"}, sort=("-time_s",), columns=("time_s", "late"))
    found = view.rows(STEPS)
    assert list(found) == ["time_s", "late"]
    assert list(found["time_s"][:3]) == [6, 4, 2]
    assert list(found["late"]) == [True, False, False, False]


def test_groups_come_in_the_order_of_their_first_rows() -> None:
    of = {"n": "size", "middle": "median time_s", "high": "q80 time_s", "lost": "missing time_s"}
    found = View(by=("ranks",), of=of, total="all").rows(STEPS).set_index("ranks")
    assert list(found.index) == [2, 1, "all"]
    assert list(found["n"]) == [4, 2, 6]
    assert list(found["middle"]) == [4, 6, 4]
    assert list(found["lost"]) == [1, 0, 1]
    assert found.loc[1, "high"] == pytest.approx(7.2)


def test_a_column_goes_across() -> None:
    view = View(
        by=("ranks",), of={"s": "median time_s"}, across="order", then={"gain": "s_depth / s_breadth"}
    )
    found = view.rows(STEPS).set_index("ranks")
    assert list(found) == ["s", "s_depth", "s_breadth", "gain"]
    assert dict(found["gain"]) == {2: 2.5, 1: 2.0}


def test_each_row_is_compared_with_another() -> None:
    steps = STEPS.assign(step=[1, 2, 1, 2, 1, 1])
    other = Other(where="order == 'depth'", on=("ranks", "step"), columns=("time_s",))
    found = View(other=other, then={"over": "time_s / time_s_other"}).rows(steps)
    assert list(found["time_s_other"]) == [4, 6, 4, 6, 8, 8]
    assert list(found["over"].dropna()) == [1, 1, 0.5, 1, 0.5]


def test_what_is_added_is_made_of_what_was_added_before() -> None:
    found = View(add={"ms": "1e3 * time_s", "twice_ms": "2 * ms", "unit": "'ms'"}).rows(STEPS)
    assert list(found["twice_ms"][:2]) == [8000, 12000]
    assert set(found["unit"]) == {"ms"}
