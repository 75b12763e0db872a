"""Runs in a scale model (docs/scale-model.md): throughput, ratios between schemes, efficiency.

A point is a scheme on a number of ranks, with an outer link and a number of tokens per rank and step; its
runs are repeats. Rates at the machine's scale are the measured ones times `scale`; ratios need no scale.

step_time_s, _min_s, _max_s  median, least and largest over repeats of the median measured step
model_flop_per_s_per_rank    as measured; `at_scale` times the scale
predicted_step_time_s        by the predictor, from the box's own rates (cost/scale_model.py); nothing fitted
measured_over_predicted      of the step time; prediction_error_percent: how far from 1, without its sign
over_zero3, over_zeropp      throughput over that scheme's at the same point
efficiency                   throughput per rank over that on `base_ranks`, the fewest ranks of the series
outer_link_gigabytes_per_s   of a rank, at the machine's scale
outer_link_share             the outer link's rate over the largest in the table of that cluster
"""

import pandas as pd

from lowband.cost.flops import MODEL_CONVENTION
from lowband.report.tables import EXPERIMENT

CONDITIONS = [*EXPERIMENT, "micro_batch", "accumulation", "outer_link_bytes_per_s", "overlap"]
POINT = [*CONDITIONS, "ranks", "scheme"]
SERIES = [*CONDITIONS, "scheme"]


def build(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per point with at least one run that ended ok."""
    df = runs[(runs["scale"] > 1) & (runs["status"] == "ok")].groupby(POINT, sort=False).agg(
        repeats=("step_time_s", "size"),
        scale=("scale", "first"),
        tokens_per_step=("tokens_per_step", "first"),
        model_flop_per_token=("model_flop_per_token", "first"),
        step_time_s=("step_time_s", "median"),
        step_time_min_s=("step_time_s", "min"),
        step_time_max_s=("step_time_s", "max"),
        predicted_step_time_s=("predicted_step_time_s", "first"),
        compute_time_s=("compute_time_s", "median"),
        exposed_comm_time_s=("exposed_comm_time_s", "median"),
        hidden_comm_time_s=("hidden_comm_time_s", "median"),
        real_share=("real_share", "max"),
        interface_bytes=("interface_bytes", "median"),
        ledger_bytes=("ledger_bytes", "median"),
        links=("links", "first"),
    ).reset_index()  # fmt: skip
    df["measured_over_predicted"] = df["step_time_s"] / df["predicted_step_time_s"]
    df["prediction_error_percent"] = 100 * (df["measured_over_predicted"] - 1).abs()
    df["tokens_per_rank"] = df["tokens_per_step"] / df["ranks"]
    rate = df["model_flop_per_token"] * df["tokens_per_rank"] / df["step_time_s"]
    df["model_flop_per_s_per_rank"] = rate
    df["model_flop_per_s_per_rank_at_scale"] = rate * df["scale"]
    df["flop_convention"] = MODEL_CONVENTION
    df["interface_over_ledger"] = df["interface_bytes"] / df["ledger_bytes"]
    for other in ("zero3", "zeropp"):
        df = df.merge(_rate_of(df, other), on=[*CONDITIONS, "ranks"], how="left")
        df[f"over_{other}"] = df["model_flop_per_s_per_rank"] / df.pop("other_rate")
    base = df.sort_values("ranks", kind="stable").groupby(SERIES, sort=False)
    first = base[["ranks", "model_flop_per_s_per_rank"]].first().reset_index()
    first = first.rename(columns={"ranks": "base_ranks", "model_flop_per_s_per_rank": "base_rate"})
    df = df.merge(first, on=SERIES, how="left")
    df["efficiency"] = df["model_flop_per_s_per_rank"] / df.pop("base_rate")
    df["outer_link_gigabytes_per_s"] = df["outer_link_bytes_per_s"] * df["scale"] / 1e9
    widest = df.groupby("cluster")["outer_link_bytes_per_s"].transform("max")
    df["outer_link_share"] = df["outer_link_bytes_per_s"] / widest
    return df


def _rate_of(df: pd.DataFrame, scheme: str) -> pd.DataFrame:
    rows = df.loc[df["scheme"] == scheme, [*CONDITIONS, "ranks", "model_flop_per_s_per_rank"]]
    return rows.rename(columns={"model_flop_per_s_per_rank": "other_rate"})
