"""Loss against time on a slow link: losses of the suite `wan` at step times of the suites `wan-*`.

Losses are measured, and do not depend on links. A row's provenance is that of its step time: measured in
the scale model, or predicted for it where no run measured it (validation/wan.py).

outer_link_bits_per_s  of a node, at the machine's scale
time_s                 since the start, in the box: steps times their mean time over whole periods
loss, _low, _high      mean, least and largest over seeds of the mean over WINDOW steps
"""

import pandas as pd

from lowband.evidence.tables.derived.convergence_curves import WINDOW
from lowband.evidence.tables.derived.wan_losses import last_step, losses_of_suite

BOX = "wan-box"  # the cluster of step times
EVERY = 4  # steps from one row to the next


def build(runs: pd.DataFrame, steps: pd.DataFrame, wan_steps: pd.DataFrame) -> pd.DataFrame:
    """One row per scheme, rate and EVERY-th step, from the first full window to the last that all have."""
    times = step_times(runs, steps, wan_steps)
    df = losses_of_suite(runs, steps).sort_values(["run_id", "step"], kind="stable", ignore_index=True)
    smooth = df.groupby("run_id", sort=False)["loss"].rolling(WINDOW).mean()
    df = df.assign(loss=smooth.reset_index(level=0, drop=True)).dropna(subset=["loss"])
    df = df[(df["step"] <= last_step(df)) & (df["step"] % EVERY == 0)]
    curves = df.groupby(["scheme", "step"], sort=False).agg(
        seeds=("repeat", "nunique"), loss=("loss", "mean"), loss_low=("loss", "min"),
        loss_high=("loss", "max"),
    )  # fmt: skip
    df = times.merge(curves.reset_index(), on="scheme", how="inner")
    df["time_s"] = df["step"] * df["step_time_s"]
    return df.drop(columns=["predicted_step_time_s", "compute_time_s"])


def step_times(runs: pd.DataFrame, steps: pd.DataFrame, wan_steps: pd.DataFrame) -> pd.DataFrame:
    """One row per scheme and predicted rate: step_time_s, measured if it was, and the predicted one."""
    boxed = runs[(runs["cluster"] == BOX) & (runs["status"] == "ok")]
    keys = ["scheme", "outer_link_bytes_per_s"]
    timed = steps.loc[~steps["is_warmup"], ["run_id", "step_time_s"]].merge(
        boxed[["run_id", *keys]], on="run_id"
    )
    timed = _rounded(timed)
    measured = timed.groupby(keys)["step_time_s"].mean().rename("measured_s").reset_index()
    df = _rounded(wan_steps).rename(columns={"step_time_s": "predicted_step_time_s"})
    df = df.merge(measured, on=keys, how="left")
    df["provenance"] = df["measured_s"].notna().map({True: "measured", False: "predicted"})
    df["step_time_s"] = df.pop("measured_s").fillna(df["predicted_step_time_s"])
    return df


def _rounded(df: pd.DataFrame) -> pd.DataFrame:
    """With rates that can be compared: 0.01 of a rate is no exact number."""
    return df.assign(outer_link_bytes_per_s=df["outer_link_bytes_per_s"].round(3))
