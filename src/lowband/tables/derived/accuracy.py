"""Errors of predictions against published values, per source; calibration and held-out rows separately.

mean_error_percent, max_error_percent  of |predicted / published - 1|
"""

import pandas as pd

from lowband.tables.points import EXPERIMENT


def build(validation: pd.DataFrame) -> pd.DataFrame:
    """One row per source and use; experiment columns that do not apply are "-"."""
    df = validation.assign(error=validation["error_percent"].abs())
    rows = df.groupby(["source", "cluster", "stack", "use"], sort=False).agg(
        rows=("row", "size"), mean_error_percent=("error", "mean"), max_error_percent=("error", "max")
    )
    out = rows.reset_index()
    for column in EXPERIMENT:
        if column not in out:
            out.insert(0, column, {"provenance": "predicted", "suite": "validation"}.get(column, "-"))
    return out.assign(seq_len=0)
