"""Every shipped table of predictions is what the predictor says today, so that no change goes unnoticed."""

from pathlib import Path

import pandas as pd
import pytest

from lowband.evidence.validation.tables import PREDICTED
from lowband.spec.csv_tables import read_table, write_csv
from tests.checkout import CONFIG

SHIPPED = CONFIG.root / "results" / "reference" / "predicted"
# Where a fit of constants ends depends, within the size of its last step (1e-8), on how a processor sums.
FITTED = {"offload_constants", "offload_logs"}


@pytest.mark.parametrize("name", sorted({*PREDICTED} - {"frontier_map"}))
def test_a_table_is_todays(name: str, tmp_path: Path) -> None:
    write_csv(PREDICTED[name](CONFIG), tmp_path / "today.csv")
    today, shipped = read_table(tmp_path / "today.csv"), read_table(SHIPPED / f"{name}.csv")
    # Another processor may sum otherwise.
    pd.testing.assert_frame_equal(today, shipped, rtol=1e-5 if name in FITTED else 1e-9)
