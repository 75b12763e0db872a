"""Which method trains fastest on which link between nodes: losses of the suite `wan` at modelled step times.

Losses are measured; a row's provenance is that of its step time (wan_curves.py).

utilization       share of a step in which matrix products run at the paced rate; also predicted_utilization
utilization_error absolute difference of both
final_loss        as in wan_losses.py, mean over seeds; difference likewise; difference_max: of the worst seed
target_s          seconds in the box until the loss, as in wan_curves.py, is at most TARGET
target_steps      the steps that this takes
over_first        target_s over that of the method that gets there first at this rate
equal_time_loss   when the fastest method has taken its last step; none before a full window of steps
"""

import pandas as pd

from lowband.evidence.tables.derived import wan_curves, wan_losses
from lowband.evidence.tables.derived.wan_curves import step_times

TARGET = 2.8  # nats per token, chosen before the runs


def build(runs: pd.DataFrame, steps: pd.DataFrame, wan_steps: pd.DataFrame) -> pd.DataFrame:
    """One row per scheme and rate."""
    curves = wan_curves.build(runs, steps, wan_steps)
    df = step_times(runs, steps, wan_steps)
    df["utilization"] = df["compute_time_s"] / df["step_time_s"]
    df["predicted_utilization"] = df["compute_time_s"] / df["predicted_step_time_s"]
    df["utilization_error"] = (df["utilization"] - df["predicted_utilization"]).abs()
    df = df.merge(_final(runs, steps), on="scheme", how="inner")
    keys = ["scheme", "outer_link_bits_per_s"]
    reached = curves[curves["loss"] <= TARGET].groupby(keys)[["step", "time_s"]].min()
    reached.columns = pd.Index(["target_steps", "target_s"])
    df = df.merge(reached.reset_index(), on=keys, how="left")
    first = df.groupby("outer_link_bits_per_s")["target_s"].transform("min")
    df["over_first"] = df["target_s"] / first
    return df.merge(_at_equal_time(curves), on=keys, how="left")


def _final(runs: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """By scheme: seeds, final_loss, its difference from the reference."""
    return wan_losses.build(runs, steps).groupby("scheme", sort=False).agg(
        seeds=("repeat", "nunique"), final_loss=("final_loss", "mean"), difference=("difference", "mean"),
        difference_max=("difference", "max"),
    ).reset_index()  # fmt: skip


def _at_equal_time(curves: pd.DataFrame) -> pd.DataFrame:
    """By scheme and rate: the loss when the fastest scheme at this rate takes its last step."""
    rate = "outer_link_bits_per_s"
    ends = curves.groupby([rate, "scheme"])["time_s"].max().groupby(rate).min()
    in_time = curves[curves["time_s"] <= curves[rate].map(ends)].sort_values("step")
    last = in_time.groupby(["scheme", rate])[["step", "loss"]].last()
    last.columns = pd.Index(["equal_time_steps", "equal_time_loss"])
    return last.reset_index()
