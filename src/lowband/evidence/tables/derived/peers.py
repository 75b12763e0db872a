"""Our engine against each peer on the same model, data, ranks and clock.

status, cause     how the peer's runs ended: ok if one of them did; for `not run` the reason, and the other
                  columns are empty
notes             `shimmed`: part of the peer is replaced by our code, so its times are not meaningful
step_time_ratio   our median step time over the peer's: below 1 is faster; _low, _high: of our fastest repeat
                  over the peer's slowest, and the other way round
memory_ratio      our peak resident memory (of the fullest rank) over the peer's
loss_difference   largest over steps and repeats
outside_bytes     sent per rank and step, counted outside the engine; `outside_bytes_<level>`: in groups of
                  that level
interface_bytes   sent per step by a rank's interface in a box, headers included: the kernel's count
"""

import pandas as pd

from lowband.evidence.tables.points import POINT, beside, points, same_but, with_options
from lowband.spec.records import CONTROL

OURS, OK = "lowband", "ok"
SPREAD = ["step_time_min_s", "step_time_max_s"]
VALUES = ["step_time_s", "tokens_per_s", "peak_memory_bytes_max", "outside_bytes", "interface_bytes"]


def build(runs: pd.DataFrame, steps: pd.DataFrame, outside: pd.DataFrame) -> pd.DataFrame:
    """One row per peer and point; medians over repeats that ended ok."""
    by_point = runs.assign(
        tokens_per_s=runs["tokens_per_step"] / runs["step_time_s"],
        interface_bytes=runs["interface_bytes"] / runs["steps"],
    ).groupby("point", sort=False)
    steps_s = by_point["step_time_s"]
    spread = pd.DataFrame({SPREAD[0]: steps_s.min(), SPREAD[1]: steps_s.max()})
    df = points(runs).join(by_point[VALUES].median()).join(spread)
    ended_ok_last = runs.sort_values("status", key=lambda status: status == OK, kind="stable")
    shown = ["is_quantized", "status", "cause", "notes"]
    df = df.join(ended_ok_last.drop_duplicates("point", keep="last").set_index("point")[shown])
    by_level = outside[outside["collective"] != CONTROL].pivot_table(
        index="point", columns="level", values="outside_bytes", aggfunc="sum"
    )
    repeats = outside.groupby("point")["repeat"].nunique()
    by_level = by_level.div(repeats, axis=0).add_prefix("outside_bytes_")
    df = df.join(by_level).join(_loss_differences(runs, steps)).reset_index(drop=True)
    # Only our runs that ended ok can be compared.
    ours = df[(df["engine"] == OURS) & (df["status"] == OK)]
    described = [column for column in POINT if column not in ("point", "engine")]
    keys = [*dict.fromkeys([*described, *same_but(df, "engine")])]
    compared = ["point", *VALUES, *SPREAD, *by_level]
    both = df[df["engine"] != OURS].merge(ours[[*keys, *compared]], on=keys, suffixes=("_peer", "_ours"))
    both["step_time_ratio"] = both["step_time_s_ours"] / both["step_time_s_peer"]
    both["step_time_ratio_low"] = both["step_time_min_s_ours"] / both["step_time_max_s_peer"]
    both["step_time_ratio_high"] = both["step_time_max_s_ours"] / both["step_time_min_s_peer"]
    both["memory_ratio"] = both["peak_memory_bytes_max_ours"] / both["peak_memory_bytes_max_peer"]
    return both.rename(columns={"engine": "peer"}).assign(engine=OURS)


def _loss_differences(runs: pd.DataFrame, steps: pd.DataFrame) -> "pd.Series[float]":
    """By point: the largest difference of a step's loss from ours in the same repeat."""
    df = with_options(steps, runs)
    df = beside(df, df[df["engine"] == OURS], "engine", on=("repeat", "step"), ours="loss")
    return (df["loss"] - df["ours"]).abs().groupby(df["point"]).max().rename("loss_difference")
