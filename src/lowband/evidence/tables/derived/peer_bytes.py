"""Whether each engine sent the bytes of its scheme: per rank and step, counted and in closed form.

ratio             counted over closed form
difference_bytes  absolute difference of the two
Schemes with quantized wires have no closed form here: engines differ in their scales.
"""

import pandas as pd

from lowband.evidence.tables.points import POINT


def build(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per point and engine, over the runs that were counted. All repeats send the same bytes."""
    counted = runs[runs["outside_bytes"].notna()]
    columns = ["outside_bytes", "closed_form_outside_bytes"]
    df = counted.groupby([*POINT, "is_quantized"], sort=False)[columns].max().reset_index()
    df["ratio"] = df["outside_bytes"] / df["closed_form_outside_bytes"]
    df["difference_bytes"] = (df["outside_bytes"] - df["closed_form_outside_bytes"]).abs()
    return df
