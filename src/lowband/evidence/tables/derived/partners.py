"""Loss, distance and bytes of replicas with one partner at a time, run by run (suite `decentralised`).

final_loss     mean over the last LAST_STEPS steps that all runs have: at equal tokens
difference     final_loss less that of data parallel, hsdp, with the same seed
over_averaged  final_loss less that of averaged-adam, whose replicas average with all, with the same seed
sent_bytes     per rank and step between replicas, counted
"""

import pandas as pd

from lowband.evidence.tables.derived.wan_losses import REFERENCE, final_losses, less
from lowband.evidence.tables.points import POINT
from lowband.spec.mesh import WORLD

SUITE = "decentralised"
AVERAGED = "averaged-adam"
COLUMNS = [
    "run_id", *POINT, "repeat", "final_loss", "last_step", "difference", "over_averaged",
    "consensus_distance", "sent_bytes",
]  # fmt: skip


def build(runs: pd.DataFrame, steps: pd.DataFrame, sent: pd.DataFrame) -> pd.DataFrame:
    """One row per run. sent: raw table `bytes`"""
    df = final_losses(runs, steps, SUITE)
    between = sent[sent["level"] == WORLD].groupby("run_id")["counted_bytes"].sum()
    distances = runs.set_index("run_id")["consensus_distance"]
    return df.assign(
        difference=less(df, REFERENCE),
        over_averaged=less(df, AVERAGED),
        consensus_distance=df["run_id"].map(distances),
        sent_bytes=df["run_id"].map(between),
    )[COLUMNS]
