"""Whether runs that differ only in their (exact) scheme compute the same final weights and losses."""

import pandas as pd

from lowband.evidence.tables.points import POINT, same_but


def build(runs: pd.DataFrame, loss: pd.DataFrame) -> pd.DataFrame:
    """One row per repeat and set of options other than the scheme, over exact runs that ended with weights.

    distinct_weights:    number of different final weights; 1 means bit-identical over all schemes
    max_loss_difference: over schemes and steps, from the reference of the `loss` table
    """
    worst = loss.groupby("run_id")["loss_difference"].max()
    exact = runs[runs["weights_sha256"].notna() & ~runs["is_quantized"]]
    described = [column for column in POINT if column not in ("point", "scheme")]
    group = [*dict.fromkeys([*described, "repeat", *same_but(runs, "scheme")])]
    groups = exact.assign(loss_difference=exact["run_id"].map(worst)).groupby(group, sort=False, dropna=False)
    return groups.agg(
        schemes=("scheme", "nunique"),
        distinct_weights=("weights_sha256", "nunique"),
        max_loss_difference=("loss_difference", "max"),
    ).reset_index()
