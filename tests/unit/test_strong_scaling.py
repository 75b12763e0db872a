"""Strong scaling as a table: predictions of one global batch; what is printed stands beside."""

import pandas as pd
import pytest

from lowband.evidence.validation import SOURCES, Setting
from lowband.evidence.validation.dash import job, where
from lowband.evidence.validation.strong_scaling import strong_scaling
from lowband.predict.prediction import predict
from lowband.spec.csv_tables import read_published
from tests.checkout import CONFIG


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return strong_scaling(CONFIG)


def test_the_scripts_point_is_that_of_the_comparison(table: pd.DataFrame) -> None:
    """With the script's own ranks it is the job that is compared with the paper's share of the peak."""
    source = SOURCES["dash"]
    reported = read_published(CONFIG.root / "results" / "reported" / source.csv)
    setting = Setting(CONFIG, *source.on(CONFIG), reported)
    for row in where(setting).itertuples():
        mine = table[(table["model"] == row.model) & (table["ranks"] == row.ranks)]
        if row.model == "22B":
            assert mine.empty  # the paper prints no strong scaling of it
            continue
        expected = predict(job(setting, row), interval=False)
        found = mine[mine["schedule"] == "1f1b"].iloc[0]
        assert found["tflops_per_gpu"] == pytest.approx(float(expected.tflops_per_gpu), rel=1e-12)
        assert int(row.gbs) == found["global_batch"]


def test_efficiency_falls_as_pipelines_empty(table: pd.DataFrame) -> None:
    for (_, _), rows in table.groupby(["model", "schedule"]):
        assert rows["efficiency"].iloc[0] == pytest.approx(100)
        assert rows["ranks"].is_monotonic_increasing
        assert rows["efficiency"].is_monotonic_decreasing
        assert rows["bubble"].is_monotonic_increasing
        assert len(set(rows["global_batch"])) == 1
    assert dict(zip(table["model"], table["reported_efficiency"], strict=True)) == {"175B": 89, "1T": 87}
