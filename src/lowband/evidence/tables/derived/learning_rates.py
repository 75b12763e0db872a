"""Losses at several learning rates, each scheme at the one that suits it (suite `learning-rates`).

final_loss  mean over LAST_STEPS steps, up to the last step that all runs have: at equal tokens
is_chosen   the rate is the scheme's: with the first seed, no other has less final_loss
is_graded   is_chosen, with a seed that did not choose
difference  final_loss less that of data parallel, hsdp, at its own rate, with the same seed
"""

import pandas as pd

from lowband.evidence.tables.derived.wan_losses import REFERENCE, final_losses
from lowband.evidence.tables.points import POINT

SUITE = "learning-rates"
COLUMNS = [
    "run_id", *POINT, "learning_rate", "repeat", "final_loss", "last_step", "is_chosen", "is_graded",
    "difference",
]  # fmt: skip


def build(runs: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """One row per run."""
    df = final_losses(runs[runs["status"] == "ok"], steps, SUITE)  # a rate may be too high
    df["learning_rate"] = df["run_id"].map(runs.set_index("run_id")["learning_rate"])
    is_first = df["repeat"] == df["repeat"].min()
    best = df.loc[df[is_first].groupby("scheme")["final_loss"].idxmin()].set_index("scheme")["learning_rate"]
    is_chosen = df["learning_rate"] == df["scheme"].map(best)
    reference = df[is_chosen & (df["scheme"] == REFERENCE)].set_index("repeat")["final_loss"]
    return df.assign(
        is_chosen=is_chosen,
        is_graded=is_chosen & ~is_first,
        difference=df["final_loss"] - df["repeat"].map(reference),
    )[COLUMNS]
