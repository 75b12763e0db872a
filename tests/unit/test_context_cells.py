"""The ten cells of ways along context: drawn as written, eligible, and graded as their runs say."""

import pandas as pd
import pytest

from lowband.evidence.tables.derived.context_ways import build
from lowband.evidence.validation import context_cells
from lowband.evidence.validation.context_cells import SUITE
from lowband.spec.csv_tables import read_table
from tests.checkout import CONFIG


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return read_table(CONFIG.root / "results" / "reference" / "predicted" / "context_cells.csv")


@pytest.mark.wide
def test_the_suite_is_what_is_drawn(rows: pd.DataFrame) -> None:
    """So nobody chose a cell after it was measured."""
    cells = context_cells.drawn(CONFIG)
    suite = CONFIG.suites_folder / f"{SUITE}.yaml"
    assert suite.read_text() == context_cells.text(cells)
    drawn = context_cells.table(cells)
    pd.testing.assert_frame_equal(drawn, rows, check_dtype=False)


def test_the_second_way_is_10_to_100_percent_slower(rows: pd.DataFrame) -> None:
    assert sorted(rows["cell"].unique()) == [*range(1, 11)]
    second = rows[rows["place"] == 2]["over_best"]
    assert second.between(1.1, 2.0).all()
    best = rows[rows["place"] == 1]
    assert best["step_s"].between(4, 25).all()
    ways = set(zip(best["context_attention"], best["context_states"], strict=True))
    assert len(ways) >= 5
    assert {"gpt-200k-4-heads", "gpt-200k-hybrid", "gpt-200k-states"} == set(best["model"])
    heads = rows[rows["context_attention"] == "heads"]
    assert heads.empty  # 8 ranks are more than heads


def test_the_runs_are_the_ways_up_to_twice_as_slow(rows: pd.DataFrame) -> None:
    specs = CONFIG.runs([SUITE])
    assert len(specs) == rows["is_measured"].sum()
    assert (rows["is_measured"] == (rows["over_best"] <= 2)).all()
    assert all(spec.ranks == spec.context == 8 and spec.scheme.name == "ddp" for spec in specs)


def _runs(seconds: dict[tuple[int, str], tuple[float, float]]) -> pd.DataFrame:
    """(length, way) -> measured and predicted seconds"""
    return pd.DataFrame(
        {
            "suite": SUITE, "provenance": "measured", "cluster": "context-box", "model": "small",
            "ranks": 8, "seq_len": length, "micro_batch": 1, "recompute": "none",
            "outer_link_bytes_per_s": 1.0, "scale": 1.0,
            "context_attention": way, "context_states": "auto", "status": "ok", "step_time_s": measured,
            "predicted_step_time_s": predicted,
        }
        for (length, way), (measured, predicted) in seconds.items()
    )  # fmt: skip


def test_a_cell_is_right_if_the_named_way_is_the_fastest() -> None:
    runs = _runs(
        {
            (128, "ring"): (2.0, 1.0), (128, "gather"): (3.0, 1.5),
            (256, "ring"): (4.0, 1.0), (256, "gather"): (3.0, 1.2), (256, "heads"): (5.0, 3.0),
        }
    )  # fmt: skip
    found = build(runs)
    assert found["is_right"].tolist() == [True, False]
    assert found["ways"].tolist() == [2, 3]
    assert found["right"].tolist() == [1, 1]
    assert found.loc[1, ["predicted_way", "measured_way"]].tolist() == ["ring", "gather"]
    assert found["next_predicted"].tolist() == pytest.approx([1.5, 1.2])
    assert found["next_measured"].tolist() == pytest.approx([1.5, 3 / 4])
    runs.loc[0, "status"] = "overloaded"
    assert len(build(runs)) == 1
    other = build(runs.assign(suite="another"))
    assert other.empty
