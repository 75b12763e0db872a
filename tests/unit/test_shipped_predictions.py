"""Every shipped table of predictions is what the predictor says today, so that no change goes unnoticed."""

from pathlib import Path

import pytest

from lowband.evidence.validation.tables import PREDICTED
from lowband.spec.csv_tables import read_table, write_csv
from tests.checkout import CONFIG
from tests.predictions import assert_is_shipped


@pytest.mark.parametrize("name", sorted({*PREDICTED} - {"frontier_map"}))
def test_a_table_is_todays(name: str, tmp_path: Path) -> None:
    write_csv(PREDICTED[name](CONFIG), tmp_path / "today.csv")
    assert_is_shipped(read_table(tmp_path / "today.csv"), name)
