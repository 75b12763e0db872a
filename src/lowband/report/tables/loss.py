"""Loss curves, and how far each is from the reference run's.

The reference is the run on the fewest ranks, of the first scheme, of the same experiment, batch and repeat
(repeats have other seeds).
"""

import pandas as pd

from lowband.report.tables import EXPERIMENT

COMPARED = [*EXPERIMENT, "global_batch", "repeat"]


def build(steps: pd.DataFrame) -> pd.DataFrame:
    """One row per run and step."""
    columns = [*COMPARED, "run_id", "scheme", "is_quantized", "ranks", "step", "loss"]
    df = steps[columns].merge(_references(steps), on=COMPARED)
    reference = steps[["run_id", "step", "loss"]].rename(
        columns={"run_id": "reference_run", "loss": "reference_loss"}
    )
    df = df.merge(reference, on=["reference_run", "step"], how="left")
    df["loss_difference"] = (df["loss"] - df["reference_loss"]).abs()
    return df


def _references(steps: pd.DataFrame) -> pd.DataFrame:
    runs = steps.drop_duplicates("run_id").sort_values("ranks", kind="stable")
    first = runs.groupby(COMPARED, sort=False)[["run_id", "scheme", "ranks"]].first().reset_index()
    return first.rename(
        columns={"run_id": "reference_run", "scheme": "reference_scheme", "ranks": "reference_ranks"}
    )
