"""Where training ends under each scheme, seed by seed, against the reference scheme with the same seed.

final_loss  mean over the last LAST_STEPS steps
difference  final_loss less that of `reference_scheme`
"""

import pandas as pd

from lowband.report.tables import EXPERIMENT

LAST_STEPS = 50
REFERENCE = "zero3"  # exact, and what the quantized schemes are compared with in the papers


def build(steps: pd.DataFrame) -> pd.DataFrame:
    """One row per run."""
    run = [*EXPERIMENT, "global_batch", "ranks", "scheme", "is_quantized", "repeat"]
    last = steps[steps["step"] > steps.groupby("run_id")["step"].transform("max") - LAST_STEPS]
    df = (
        last.groupby(run, sort=False)
        .agg(last_step=("step", "max"), final_loss=("loss", "mean"))
        .reset_index()
    )
    same_seed = [*EXPERIMENT, "global_batch", "ranks", "repeat"]
    reference = df.loc[df["scheme"] == REFERENCE, [*same_seed, "final_loss"]]
    df = df.merge(reference.rename(columns={"final_loss": "reference_loss"}), on=same_seed, how="left")
    df["reference_scheme"] = REFERENCE
    df["difference"] = df["final_loss"] - df["reference_loss"]
    return df
