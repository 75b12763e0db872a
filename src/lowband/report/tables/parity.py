"""Whether schemes without quantized wires compute the same: final weights and losses, per rank count."""

import pandas as pd

from lowband.report.tables import EXPERIMENT

GROUP = [*EXPERIMENT, "global_batch", "repeat", "ranks"]


def build(runs: pd.DataFrame, loss: pd.DataFrame) -> pd.DataFrame:
    """One row per rank count and repeat, over the exact runs that ended with weights.

    distinct_weights:    number of different final weights; 1 means bit-equal over all schemes
    max_loss_difference: over schemes and steps, against the reference of the `loss` table
    """
    exact = runs[runs["weights_sha256"].notna() & ~runs["is_quantized"]]
    weights = exact.groupby(GROUP, sort=False).agg(
        schemes=("scheme", "nunique"), distinct_weights=("weights_sha256", "nunique")
    )
    differences = loss[~loss["is_quantized"]].groupby(GROUP, sort=False)["loss_difference"]
    df = weights.join(differences.max().rename("max_loss_difference"))
    return df.reset_index()
