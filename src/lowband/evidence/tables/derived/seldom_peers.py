"""Our seldom exchanges beside those of torch, run by run (suite `seldom-peers`).

system         our engine, or what of torch does the same
last_loss      mean over the last LAST_STEPS steps
difference     absolute, of last_loss from ours with the same scheme, ranks and seed
outside_bytes  sent per rank in a step with an exchange, counted outside the engine
"""

import pandas as pd

from lowband.evidence.tables.derived.peers import OURS
from lowband.evidence.tables.points import POINT, beside, same_but
from lowband.spec.peers import PEER_NAMES

LAST_STEPS = 16
SUITE = "seldom-peers"
LOCAL_SGD = "DDP + PostLocalSGDOptimizer"


def build(runs: pd.DataFrame, steps: pd.DataFrame) -> pd.DataFrame:
    """One row per run."""
    df = runs[runs["suite"] == SUITE]
    late = steps[steps["step"] > steps["step"].max() - LAST_STEPS].groupby("run_id")["loss"].mean()
    df = df.assign(last_loss=df["run_id"].map(late), system=df["engine"].replace(PEER_NAMES))
    is_local = (df["engine"] == "ddp") & (df["scheme"] == "local-sgd")
    df["system"] = df["system"].mask(is_local, LOCAL_SGD)
    df = beside(df, df[df["engine"] == OURS], "engine", on=("repeat",), ours="last_loss")
    df["difference"] = (df["last_loss"] - df["ours"]).abs()
    values = ["system", "repeat", "last_loss", "difference", "outside_bytes", "step_time_s"]
    return df[[*dict.fromkeys([*POINT, *same_but(df)]), *values]]
