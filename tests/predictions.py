"""Shipped tables of predictions beside those of today."""

import pandas as pd

from lowband.spec.csv_tables import read_table
from tests.checkout import REFERENCE

# Where a fit of constants ends depends, within the size of its last step (1e-8), on how a processor sums.
FITTED = {"offload_constants", "offload_logs"}


def assert_is_shipped(today: pd.DataFrame, name: str) -> None:
    """As read from its file. Numbers may differ by what another processor's sums do."""
    shipped = read_table(REFERENCE / "predicted" / f"{name}.csv")
    pd.testing.assert_frame_equal(today, shipped, rtol=1e-5 if name in FITTED else 1e-9, obj=name)
