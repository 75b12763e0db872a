"""Final loss of replicas that meet seldom, seed by seed, beside data parallel between them (suite `wan`).

final_loss  mean over LAST_STEPS steps, up to the last step that all runs have: at equal tokens
difference  final_loss less the reference's, hsdp's, with the same seed
"""

import pandas as pd

from lowband.evidence.tables.derived.convergence import LAST_STEPS
from lowband.evidence.tables.points import POINT

SUITE = "wan"
REFERENCE = "hsdp"


def build(runs: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """One row per run."""
    df = final_losses(runs, steps, SUITE)
    return df.assign(difference=less(df, REFERENCE))


def final_losses(runs: pd.DataFrame, steps: pd.DataFrame, suite: str) -> pd.DataFrame:
    """One row per run of a suite: its point, `final_loss` and `last_step`."""
    df = losses_of_suite(runs, steps, suite)
    end = last_step(df)
    df = df[(df["step"] <= end) & (df["step"] > end - LAST_STEPS)]
    losses = df.groupby(["run_id", *POINT, "repeat"], sort=False)["loss"]
    return losses.mean().rename("final_loss").reset_index().assign(last_step=end)


def less(losses: pd.DataFrame, scheme: str) -> "pd.Series[float]":
    """Each run's loss less that of a scheme with the same seed."""
    of_scheme = losses[losses["scheme"] == scheme].set_index("repeat")["final_loss"]
    return losses["final_loss"] - losses["repeat"].map(of_scheme)


def losses_of_suite(runs: pd.DataFrame, steps: pd.DataFrame, suite: str = SUITE) -> pd.DataFrame:
    """Steps of the suite's runs, each with its run's point and repeat."""
    mine = runs.loc[runs["suite"] == suite, ["run_id", *POINT, "repeat"]]
    return steps[["run_id", "step", "loss"]].merge(mine, on="run_id")


def last_step(steps: pd.DataFrame) -> int:
    """The last step that every run has; 0 if there are none."""
    return int(steps.groupby("run_id")["step"].max().min()) if len(steps) else 0
