"""Final loss under each scheme, seed by seed, compared with the reference scheme with the same seed.

final_loss  mean over the last LAST_STEPS steps
difference  final_loss less that of `reference_scheme`
"""

import pandas as pd

from lowband.evidence.tables.points import POINT, beside, with_options

LAST_STEPS = 50
REFERENCE = "zero3"  # exact, and the papers' baseline for quantized schemes


def build(runs: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """One row per run."""
    run = ["run_id", *POINT, "is_quantized", "repeat"]
    last = steps[steps["step"] > steps.groupby("run_id")["step"].transform("max") - LAST_STEPS]
    df = (
        last.groupby(run, sort=False)
        .agg(last_step=("step", "max"), final_loss=("loss", "mean"))
        .reset_index()
    )
    df = with_options(df, runs)
    reference = df[df["scheme"] == REFERENCE]
    df = beside(df, reference, "scheme", on=("repeat",), reference_loss="final_loss")
    df["reference_scheme"] = REFERENCE
    df["difference"] = df["final_loss"] - df["reference_loss"]
    return df
