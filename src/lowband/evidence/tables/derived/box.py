"""Runs in a scale model (docs/scale-model.md): throughput, ratios between schemes, efficiency.

Rates at the machine's scale are the measured ones times `scale`; ratios need no scale.

step_time_s, _min_s, _max_s  median, least and largest over repeats of the median measured step
model_flop_per_s_per_rank    as measured; `at_scale` times the scale
predicted_step_time_s        from the box's own rates (validation/scale_model.py); nothing fitted
measured_over_predicted      of the step time; prediction_error_percent: its absolute deviation from 1
over_zero3, over_zeropp      throughput over that scheme's, all other options being equal
over_depth                   throughput over that of depth-first order, likewise
over_flat                    throughput over that of flat rings, likewise
over_hier3_depth             throughput over that of hier3 in depth-first order, likewise
scaling                      weak: equal batch per rank; strong: equal global batch
efficiency                   throughput per rank over that on `base_ranks`, the fewest ranks among the points
                             that differ only in ranks
outer_link_gigabytes_per_s   of a rank, at the machine's scale
outer_link_share             the outer link's rate over the largest in the table of that cluster
"""

import pandas as pd

from lowband.cost.flops import MODEL_CONVENTION
from lowband.evidence.tables.points import all_of, over, points, with_base

OVER = ("zero3", "zeropp")  # the schemes that all others are compared with
COMPARED: tuple[dict[str, str], ...] = (
    *({"scheme": scheme} for scheme in OVER),
    {"order": "depth"},
    {"collectives": "flat"},
    {"scheme": "hier3", "order": "depth"},
)


def build(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per point with at least one run that ended ok."""
    ok = runs[(runs["scale"] > 1) & (runs["status"] == "ok")]
    constant = ("outer_link_bytes_per_s", "scale", "tokens_per_step", "model_flop_per_token")
    times = ("compute_time_s", "exposed_comm_time_s", "hidden_comm_time_s")
    by_point = ok.groupby("point", sort=False).agg(
        repeats=("step_time_s", "size"),
        **{column: (column, "first") for column in constant},
        step_time_s=("step_time_s", "median"),
        step_time_min_s=("step_time_s", "min"),
        step_time_max_s=("step_time_s", "max"),
        predicted_step_time_s=("predicted_step_time_s", "first"),
        **{column: (column, "median") for column in times},
        real_share=("real_share", "max"),
        **{column: (column, "median") for column in ("interface_bytes", "ledger_bytes")},
        links=("links", all_of),
    )
    df = points(ok).join(by_point).reset_index(drop=True)
    df["measured_over_predicted"] = df["step_time_s"] / df["predicted_step_time_s"]
    df["prediction_error_percent"] = 100 * (df["measured_over_predicted"] - 1).abs()
    df["tokens_per_rank"] = df["tokens_per_step"] / df["ranks"]
    rate = df["model_flop_per_token"] * df["tokens_per_rank"] / df["step_time_s"]
    df["model_flop_per_s_per_rank"] = rate
    df["model_flop_per_s_per_rank_at_scale"] = rate * df["scale"]
    df["flop_convention"] = MODEL_CONVENTION
    df["interface_over_ledger"] = df["interface_bytes"] / df["ledger_bytes"]
    for chosen in COMPARED:
        df = over(df, "model_flop_per_s_per_rank", **chosen)
    df = with_base(df, "model_flop_per_s_per_rank")
    df["efficiency"] = df["model_flop_per_s_per_rank"] / df.pop("base_rate")
    df["outer_link_gigabytes_per_s"] = df["outer_link_bytes_per_s"] * df["scale"] / 1e9
    widest = df.groupby("cluster")["outer_link_bytes_per_s"].transform("max")
    df["outer_link_share"] = df["outer_link_bytes_per_s"] / widest
    return df
