"""By machine, stack and unit: the factor of its 80 % interval, and how many rows left out lie inside theirs.

factor                empty where too few rows were left out
size, scale, machine  percent of rows left out with their size, ... that lie in the interval of other folds
"""

import math

import pandas as pd

from lowband.evidence.validation import KINDS
from lowband.evidence.validation.intervals import calibrated_factors, covered

KEYS = ["cluster", "stack", "unit"]


def build(folds: pd.DataFrame, held_out: pd.DataFrame) -> pd.DataFrame:
    """One row per machine, stack and unit (time or memory)."""
    rows = covered(folds, held_out)
    percent = rows.assign(inside=100 * rows["inside"].astype(float)).pivot_table("inside", KEYS, "kind")
    table = percent.reindex(pd.MultiIndex.from_frame(rows[KEYS].drop_duplicates()), columns=list(KINDS))
    known = calibrated_factors(folds, held_out)
    factors = [known.get(tuple(key), math.nan) for key in table.index]
    return table.assign(factor=factors, provenance="predicted").reset_index()
