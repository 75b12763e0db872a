"""Stated intervals and the share of rows left out that lie in them, by kind of fold: all rows, each machine.

level   the share that the interval states
cluster, stack   - for all rows of the kind
rows    rows left out that have such an interval
inside  the share of them that lie in it
The interval of a row is from other folds (validation/intervals.py). Ratios are not among the rows.
"""

import pandas as pd

from lowband.evidence.validation.intervals import LEVEL, covered

LEVELS = (0.5, 0.6, 0.7, LEVEL, 0.9)
ALL = "-"


def build(folds: pd.DataFrame, held_out: pd.DataFrame) -> pd.DataFrame:
    """One row per level, kind of fold, and machine with its stack."""
    parts = []
    for level in LEVELS:
        rows = covered(folds, held_out, level).dropna(subset="inside")
        rows["inside"] = rows["inside"].astype(float)
        for keys in (["kind"], ["kind", "cluster", "stack", "unit"]):
            found = rows.groupby(keys, sort=False)["inside"].agg(rows="size", inside="mean").reset_index()
            parts.append(found.assign(level=level))
    out = pd.concat(parts).fillna({"cluster": ALL, "stack": ALL, "unit": ALL}).assign(provenance="predicted")
    columns = ["provenance", "level", "kind", "cluster", "stack", "unit", "rows", "inside"]
    return out[columns].reset_index(drop=True)
