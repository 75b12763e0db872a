"""Our engine against each peer on the same model, data, ranks and clock.

status, cause     how the peer's runs ended; of `not run` the reason, and the other columns are empty
notes             `shimmed`: part of the peer is replaced by our code, so its times say nothing
step_time_ratio   our median step time over the peer's: below 1 is faster
memory_ratio      our peak resident memory (of the fullest rank) over the peer's
loss_difference   largest over steps and repeats
outside_bytes     sent per rank and step, counted from outside; `outside_bytes_<level>`: in groups of that
                  level
interface_bytes   sent per step by a rank's interface of a box, headers included: the kernel's count
"""

import pandas as pd

from lowband.report import tables
from lowband.spec.records import CONTROL

OURS = "lowband"
POINT = [column for column in tables.POINT if column != "engine"]
RUN = [*POINT, "engine"]
VALUES = ["step_time_s", "tokens_per_s", "peak_memory_bytes_max", "outside_bytes", "interface_bytes"]


def build(runs: pd.DataFrame, steps: pd.DataFrame, outside: pd.DataFrame) -> pd.DataFrame:
    """One row per peer and point; medians over repeats that ended ok."""
    by_run = runs.assign(
        tokens_per_s=runs["tokens_per_step"] / runs["step_time_s"],
        interface_bytes=runs["interface_bytes"] / runs["steps"],
    ).groupby(RUN, sort=False)
    df = by_run[VALUES].median().join(by_run[["is_quantized", "status", "cause", "notes"]].last())
    by_level = outside[outside["collective"] != CONTROL].pivot_table(
        index=RUN, columns="level", values="outside_bytes", aggfunc="sum"
    )
    repeats = outside.groupby(RUN)["repeat"].nunique()
    by_level = by_level.div(repeats, axis=0).add_prefix("outside_bytes_")
    df = df.join(by_level).join(_loss_differences(steps)).reset_index()
    ours = df[df["engine"] == OURS].drop(columns=["engine", "is_quantized", "loss_difference"])
    # Only what ended ok on our side can be compared.
    ours = ours[ours["status"] == "ok"].drop(columns=["status", "cause", "notes"])
    both = df[df["engine"] != OURS].merge(ours, on=POINT, suffixes=("_peer", "_ours"))
    both["step_time_ratio"] = both["step_time_s_ours"] / both["step_time_s_peer"]
    both["memory_ratio"] = both["peak_memory_bytes_max_ours"] / both["peak_memory_bytes_max_peer"]
    return both.rename(columns={"engine": "peer"}).assign(engine=OURS)


def _loss_differences(steps: pd.DataFrame) -> "pd.Series[float]":
    """By point and engine: the largest difference of a step's loss from ours in the same repeat."""
    columns = [*POINT, "repeat", "step", "loss"]
    ours = steps.loc[steps["engine"] == OURS, columns]
    both = steps[[*columns, "engine"]].merge(ours, on=columns[:-1], suffixes=("", "_ours"))
    both["loss_difference"] = (both["loss"] - both["loss_ours"]).abs()
    return both.groupby(RUN)["loss_difference"].max()
