"""Our engine against each peer on the same model, data, ranks and clock.

step_time_ratio  our median step time over the peer's: below 1 is faster
memory_ratio     our peak resident memory (of the fullest rank) over the peer's
loss_difference  largest over repeats, after the last step
"""

import pandas as pd

from lowband.report import tables

OURS = "lowband"
POINT = [column for column in tables.POINT if column != "engine"]
VALUES = ["step_time_s", "peak_memory_bytes_max"]


def build(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per peer and point; medians over repeats."""
    ok = runs[runs["status"] == "ok"]
    medians = ok.groupby([*POINT, "engine"], sort=False)[VALUES].median().reset_index()
    losses = ok[[*POINT, "engine", "repeat", "final_loss"]]
    ours, peers = medians[medians["engine"] == OURS], medians[medians["engine"] != OURS]
    df = peers.merge(ours.drop(columns="engine"), on=POINT, suffixes=("_peer", "_ours"))
    df["step_time_ratio"] = df["step_time_s_ours"] / df["step_time_s_peer"]
    df["memory_ratio"] = df["peak_memory_bytes_max_ours"] / df["peak_memory_bytes_max_peer"]
    both = losses[losses["engine"] != OURS].merge(
        losses[losses["engine"] == OURS].drop(columns="engine"), on=[*POINT, "repeat"], suffixes=("_peer", "")
    )
    both["loss_difference"] = (both["final_loss"] - both["final_loss_peer"]).abs()
    worst = both.groupby([*POINT, "engine"], sort=False)["loss_difference"].max().reset_index()
    df = df.merge(worst, on=[*POINT, "engine"]).rename(columns={"engine": "peer"})
    return df.assign(engine=OURS)
