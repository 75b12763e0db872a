"""Every shipped table of predictions is what the predictor says today, so that no change goes unnoticed."""

from pathlib import Path

import pandas as pd
import pytest

from lowband.evidence.validation.tables import PREDICTED
from lowband.spec.csv_tables import read_table, write_csv
from tests.checkout import CONFIG

SHIPPED = CONFIG.root / "results" / "reference" / "predicted"


@pytest.mark.parametrize("name", sorted({*PREDICTED} - {"frontier_map"}))
def test_a_table_is_todays(name: str, tmp_path: Path) -> None:
    write_csv(PREDICTED[name](CONFIG), tmp_path / "today.csv")
    today, shipped = read_table(tmp_path / "today.csv"), read_table(SHIPPED / f"{name}.csv")
    pd.testing.assert_frame_equal(today, shipped, rtol=1e-9)  # another processor may sum otherwise
