"""Losses of replicas whose exchanges arrive late, and what these hold, run by run (suite `delay`).

difference                final_loss less that of data parallel, hsdp, with the same seed
held_bytes_per_parameter  for exchanges: anchors, outer optimizer, messages in flight
"""

import pandas as pd

from lowband.evidence.tables.derived.wan_losses import REFERENCE, less
from lowband.evidence.tables.points import POINT

OF_EXCHANGES = ("anchor", "outer", "in_flight")
SUITE = "delay"


def build(runs: pd.DataFrame, states: pd.DataFrame) -> pd.DataFrame:
    """One row per run."""
    df = runs.loc[runs["suite"] == SUITE, [*POINT, "run_id", "repeat", "parameters", "final_loss"]]
    held = states[states["state"].isin(OF_EXCHANGES)].groupby("run_id")["held_bytes"].sum()
    return df.assign(
        difference=less(df, REFERENCE),
        held_bytes_per_parameter=df["run_id"].map(held).fillna(0) / df["parameters"],
    )
