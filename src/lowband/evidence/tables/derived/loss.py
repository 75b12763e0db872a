"""Loss curves, and the difference of each from the reference run's.

The reference is the run on the fewest ranks, of the first scheme, with the same global batch, repeat
(repeats have different seeds) and other options; one that sends nothing quantized, if there is any.
"""

import pandas as pd

from lowband.evidence.tables.points import POINT, same_but

# Options of how a global batch is computed, which change losses only by rounding.
PARTITION = ("scheme", "ranks", "scaling", "micro_batch", "accumulation")


def build(runs: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """One row per run and step."""
    columns = [*POINT, "repeat", "run_id", "is_quantized", "step", "loss"]
    df = steps[columns].merge(_references(runs[runs["run_id"].isin(steps["run_id"])]), on="run_id")
    reference = steps[["run_id", "step", "loss"]].rename(
        columns={"run_id": "reference_run", "loss": "reference_loss"}
    )
    df = df.merge(reference, on=["reference_run", "step"], how="left")
    df["loss_difference"] = (df["loss"] - df["reference_loss"]).abs()
    return df


def _references(runs: pd.DataFrame) -> pd.DataFrame:
    """By run_id: the run that the run's losses are compared with."""
    compared = [*same_but(runs, *PARTITION), "global_batch", "repeat"]
    first = runs.sort_values(["is_quantized", "ranks"], kind="stable").drop_duplicates(compared)
    first = first[[*compared, "run_id", "scheme", "ranks"]].rename(
        columns={"run_id": "reference_run", "scheme": "reference_scheme", "ranks": "reference_ranks"}
    )
    both = runs[["run_id", *compared]].merge(first, on=compared)
    return both[["run_id", "reference_run", "reference_scheme", "reference_ranks"]]
