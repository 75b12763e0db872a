"""Bytes that the fullest rank holds, by state, at each experiment's most ranks.

Kinds without a closed form have an empty one.
"""

import pandas as pd

from lowband.evidence.tables.points import EXPERIMENT, POINT


def build(states: pd.DataFrame) -> pd.DataFrame:
    """One row per point and state. All repeats hold the same bytes."""
    most = states[states["ranks"] == states.groupby(EXPERIMENT)["ranks"].transform("max")]
    columns = ["held_bytes", "closed_form_bytes", "difference_bytes"]
    return most.groupby([*POINT, "state"], sort=False)[columns].max().reset_index()
