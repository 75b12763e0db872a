"""The table of alternatives for arXiv 2501.04266 on Frontier."""

import pandas as pd
import pytest

from lowband.evidence.validation import SOURCES, Setting
from lowband.evidence.validation.frontier import RANKS, at_point
from lowband.evidence.validation.frontier_alternatives import ALTERNATIVES, alternatives
from lowband.evidence.validation.validate import with_facts
from lowband.predict.prediction import speed
from lowband.spec.csv_tables import read_table
from lowband.spec.stack import Stack
from tests.checkout import CONFIG, REFERENCE


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return alternatives(CONFIG).set_index("alternative")


def test_nothing_is_fitted_to_fewer_rows_than_constants(table: pd.DataFrame) -> None:
    """The paper gives two independent ratios; the efficiency is never fitted."""
    assert (table["free"] <= 2).all()
    assert (table["free"] == [len(one.free) for one in ALTERNATIVES]).all()
    assert table.index.is_unique


def test_a_row_is_what_its_values_predict(table: pd.DataFrame) -> None:
    source = SOURCES["frontier"]
    machine, stack = source.on(CONFIG)
    share = float(table.loc["one share of all links", "values"].split(" = ")[1])
    facts = {"stack.efficiency.node": share, "stack.efficiency.world": share}
    setting = Setting(CONFIG, *with_facts(machine, stack, facts), None)
    zero3, hier3 = (
        float(speed(at_point(setting, name, RANKS)).tflops_per_gpu) for name in ("zero3", "hier3")
    )
    assert table.loc["one share of all links", "ratio_hier3_zero3"] == pytest.approx(hier3 / zero3, rel=5e-3)
    assert isinstance(stack, Stack)


def test_the_shipped_table_says_what_is_found_today(table: pd.DataFrame) -> None:
    shipped = read_table(REFERENCE / "predicted" / "alternatives.csv")
    for column in ("alternative", "values", "place", "gives", "plausibility"):
        found = table.reset_index()[column].astype(str)
        assert shipped[column].fillna("").astype(str).tolist() == found.tolist()


def test_what_the_documents_say_of_it(table: pd.DataFrame) -> None:
    """docs/predictor-errors.md: one share of all links gives the ratios; published links never do."""
    one = table.loc["one share of all links"]
    assert one["gives"]
    assert one["free"] == 1
    assert one["largest_error_percent"] < 1
    assert one["efficiency"] == pytest.approx(0.917, abs=0.002)
    as_published = table[table.index.str.startswith("links as published")]
    assert len(as_published) == 6
    assert not as_published["gives"].any()
    assert as_published["ratio_hier3_zero3"].max() < 1.6
    given = set(table.index[table["gives"]])
    assert given == {
        "one share of all links", "one share of all links, other passes",
        "one share of all links, no recomputation", "two shares of links (fitted again)",
    }  # fmt: skip
