"""Bytes that a rank sends per steady step, by level, collective and wire, at each experiment's most ranks."""

import pandas as pd

from lowband.evidence.tables.points import EXPERIMENT, POINT


def build(sent: pd.DataFrame) -> pd.DataFrame:
    """One row per point, level, collective and wire. All repeats send the same bytes."""
    most = sent[sent["ranks"] == sent.groupby(EXPERIMENT)["ranks"].transform("max")]
    rows = most.groupby([*POINT, "level", "collective", "wire"], sort=False)
    columns = ["counted_bytes", "closed_form_bytes", "difference_bytes"]
    return rows[columns].max().reset_index()
