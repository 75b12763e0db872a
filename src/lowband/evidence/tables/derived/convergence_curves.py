"""Loss curves of each scheme over seeds, and their difference from the reference scheme's, smoothed.

loss, loss_low, loss_high                    mean, least and largest over seeds of the mean over WINDOW steps
difference, difference_low, difference_high  the same for the loss less the reference's with the same seed
"""

import pandas as pd

from lowband.evidence.tables.derived.convergence import REFERENCE
from lowband.evidence.tables.points import POINT, beside, with_options

WINDOW = 20


def build(runs: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """One row per point and step that has a reference, from the first full window on."""
    df = with_options(steps, runs)
    reference = df[df["scheme"] == REFERENCE]
    df = beside(df, reference, "scheme", on=("repeat", "step"), reference_loss="loss")
    df = df.dropna(subset=["reference_loss"], ignore_index=True)
    df["difference"] = df["loss"] - df["reference_loss"]
    for name in ("loss", "difference"):
        rolling = df.groupby("run_id", sort=False)[name].rolling(WINDOW).mean()
        df[name] = rolling.reset_index(level=0, drop=True)
    df = df.dropna(subset=["loss"])
    spread = {
        f"{name}{suffix}": (name, statistic)
        for name in ("loss", "difference")
        for suffix, statistic in (("", "mean"), ("_low", "min"), ("_high", "max"))
    }
    groups = df.groupby([*POINT, "step"], sort=False)
    return groups.agg(seeds=("repeat", "nunique"), **spread).reset_index()
