"""Throughput and efficiency of every point, failed ones included.

tokens_per_s  tokens_per_step / median step time, over the measured steps of all repeats; of replicas that
              meet seldom, over the means of their periods
scaling       weak: the points compared have the same batch per rank, so the global batch grows with the
              ranks; strong: they have the same global batch
speedup       tokens_per_s over that at `base_ranks`, the fewest ranks among the points that differ in ranks
              alone
efficiency    speedup / (ranks / base_ranks)
over_depth    tokens_per_s over that of depth-first order, all other options being equal; over_zero3 and
              over_zeropp: over that scheme's; over_zero2_depth: over ZeRO-2's in depth-first order;
              over_zeropp_deepspeed_depth: over DeepSpeed's ZeRO++, whose order is depth-first
"""

import pandas as pd

from lowband.cost.flops import MODEL_CONVENTION
from lowband.evidence.tables.derived import median_and_spread
from lowband.evidence.tables.points import all_of, over, points, with_base

COMPARED: tuple[dict[str, str], ...] = (
    {"order": "depth"},
    {"scheme": "zero3"},
    {"scheme": "zeropp"},
    {"scheme": "zero2", "order": "depth"},
    {"scheme": "zeropp", "engine": "deepspeed", "order": "depth"},
)


def build(runs: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """One row per point, in the order of the runs."""
    constant = ("tokens_per_step", "model_flop_per_token", "peak_flop_per_s_per_rank")
    by_point = runs.groupby("point", sort=False).agg(
        runs=("run_id", "size"), runs_ok=("status", lambda status: int((status == "ok").sum())),
        **{column: (column, "first") for column in constant}, links=("links", all_of),
    )  # fmt: skip
    df = points(runs).join(by_point).join(_times(steps[~steps["is_warmup"]], runs)).reset_index(drop=True)
    # The quantiles swap: the fast steps give the high rate.
    df["tokens_per_s"] = df["tokens_per_step"] / df["step_time_s"]
    df["tokens_per_s_q20"] = df["tokens_per_step"] / df["step_time_q80_s"]
    df["tokens_per_s_q80"] = df["tokens_per_step"] / df["step_time_q20_s"]
    df["model_flop_per_s_per_rank"] = df["model_flop_per_token"] * df["tokens_per_s"] / df["ranks"]
    df["flop_convention"] = MODEL_CONVENTION
    df["mfu"] = df["model_flop_per_s_per_rank"] / df["peak_flop_per_s_per_rank"]
    df["exposed_comm_share"] = df["exposed_comm_time_s"] / df["step_time_s"]
    df = with_base(df, "tokens_per_s")
    df["speedup"] = df["tokens_per_s"] / df.pop("base_rate")
    df["efficiency"] = df["speedup"] / (df["ranks"] / df["base_ranks"])
    for chosen in COMPARED:
        df = over(df, "tokens_per_s", **chosen)
    return df


def _times(measured: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Per point: number of measured steps, their median times, and the spread of the step time."""
    steps = measured.groupby("point", sort=False).size().rename("measured_steps")
    groups = _by_period(measured, runs).groupby("point", sort=False)
    others = groups[["exposed_comm_time_s", "hidden_comm_time_s"]].median()
    return steps.to_frame().join(median_and_spread(groups, "step_time_s")).join(others)


def _by_period(measured: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Times of steps; of a run whose replicas meet every n steps, the means of n that follow each other."""
    if "period" not in runs or (runs["period"] == 1).all():  # rows of before have none
        return measured
    period = measured["run_id"].map(runs.drop_duplicates("run_id").set_index("run_id")["period"]).fillna(1)
    place = measured.groupby("run_id", sort=False).cumcount() // period
    times = ["step_time_s", "exposed_comm_time_s", "hidden_comm_time_s"]
    is_whole = measured.groupby([measured["run_id"], place])["run_id"].transform("size") == period
    kept = is_whole | ~is_whole.groupby(measured["run_id"]).transform("any")
    keys = [measured["point"], measured["run_id"], place.rename("place")]
    return measured[kept].groupby([key[kept] for key in keys], sort=False)[times].mean().reset_index()
