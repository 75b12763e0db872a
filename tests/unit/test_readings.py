"""Other readings of the abstract of arXiv 2501.04266: their bytes by hand, their ratios, what is shipped."""

from dataclasses import replace

import pandas as pd
import pytest

from lowband.evidence.validation import SOURCES, Setting
from lowband.evidence.validation.frontier import RANKS, at_point
from lowband.evidence.validation.frontier_alternatives import alternatives
from lowband.evidence.validation.frontier_readings import reading_costs, readings, schemes
from lowband.evidence.validation.validate import with_facts
from lowband.predict.prediction import speed
from lowband.spec.csv_tables import read_table
from lowband.spec.mesh import Levels
from tests.checkout import CONFIG, REFERENCE

SHIPPED = REFERENCE / "predicted"


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return readings(CONFIG)


@pytest.fixture(scope="module")
def costs() -> pd.DataFrame:
    return reading_costs(CONFIG).set_index(["reading", "passes"])


def test_every_reading_has_three_levels_and_can_be_placed() -> None:
    """Package, node and world each hold a state or are met by gradients; the engine's check accepts all."""
    levels = Levels.fit(CONFIG.machine("frontier").sizes, RANKS)
    found = schemes(CONFIG)
    assert len(found) >= 4
    for scheme in found.values():
        scheme.check(levels)
        assert "package" in scheme.machine_levels
        assert scheme.is_quantized
    assert [name for name, scheme in found.items() if scheme.update_gather == "int8"]
    assert [name for name, scheme in found.items() if scheme.secondary is not None]


def test_bytes_between_nodes_by_hand(costs: pd.DataFrame) -> None:
    """A GCD of each node shares an eighth of the values; 48 nodes send 47/48 of it.

    Scales take 4 bytes of 256 values. The norm of gradients and padding are far below the tolerance.
    """
    eighth = CONFIG.model("gpt-20b").parameters / 8 * 47 / 48
    int8, int4, bf16 = 1 + 4 / 256, 0.5 + 4 / 256, 2

    def sent(reading: str, passes: int) -> float:
        return float(costs.loc[(reading, passes), "world_bytes"])

    for passes in (1, 2, 4):
        assert sent("zeropp", passes) == pytest.approx(passes * eighth * (int8 + int4), rel=0.01)
        assert sent("hier3", passes) == pytest.approx(eighth * (bf16 + int4), rel=0.01)
        assert sent("hier3, INT8 update", passes) == pytest.approx(eighth * (int8 + int4), rel=0.01)
        assert sent("optimizer in the node", passes) == pytest.approx(2 * eighth * bf16, rel=0.01)


def test_memory_by_hand(costs: pd.DataFrame) -> None:
    """A secondary copy in the package adds a half of the weights; weights over the node save 3/8 of them."""
    held = costs["peak_memory_bytes"].xs(4, level="passes")
    weights = 2 * CONFIG.model("gpt-20b").parameters
    more = held["secondary within the node"] - held["hier3"]
    assert more == pytest.approx(weights / 8, rel=0.02)
    assert held["hier3"] == held["hier3, INT8 update"]


def test_a_row_is_what_its_values_predict(table: pd.DataFrame) -> None:
    rows = table.set_index(["reading", "alternative"])
    row = rows.loc[("hier3, INT8 update", "one share of all links")]
    share = float(row["values"].split(" = ")[1])
    facts = {"stack.efficiency.node": share, "stack.efficiency.world": share}
    setting = Setting(CONFIG, *with_facts(*SOURCES["frontier"].on(CONFIG), facts), None)
    base = at_point(setting, "zeropp", RANKS)
    rates = [
        float(speed(replace(base, scheme=scheme)).tflops_per_gpu)
        for scheme in (schemes(CONFIG)["hier3, INT8 update"], base.scheme)
    ]
    assert row["ratio_hier3_zeropp"] == pytest.approx(rates[0] / rates[1], rel=5e-3)


def test_hier3s_rows_are_those_of_the_alternatives(table: pd.DataFrame) -> None:
    mine = table[table["reading"] == "hier3"].drop(columns=["reading", "nearest"]).reset_index(drop=True)
    theirs = alternatives(CONFIG)
    theirs = theirs[theirs["alternative"].isin(mine["alternative"])].reset_index(drop=True)
    pd.testing.assert_frame_equal(mine, theirs)
    assert table.groupby("reading")["nearest"].sum().eq(1).all()


def test_the_shipped_tables_say_what_is_found_today(table: pd.DataFrame, costs: pd.DataFrame) -> None:
    shipped = read_table(SHIPPED / "readings.csv")
    for column in ("reading", "alternative", "values", "place", "gives", "nearest"):
        assert shipped[column].fillna("").astype(str).tolist() == table[column].astype(str).tolist()
    shipped = read_table(SHIPPED / "reading_costs.csv").set_index(["reading", "passes"])
    numbers = ["package_bytes", "node_bytes", "world_bytes", "peak_memory_bytes"]
    pd.testing.assert_frame_equal(shipped[numbers], costs[numbers].astype(float))
