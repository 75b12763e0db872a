"""Published numbers of methods that exchange weights seldom, predicted by cost/seldom.py, without a fit.

Streaming DiLoCo (arXiv 2501.18512), Table 4: the rate between replicas at which they compute a given share of
their time, by the authors' own simulator. A step's backward, two thirds of it, hides an exchange; with
overlap the next step does too (the table does not print tau; one step is what its rows show). Fragments are
of three layers; weights have 16 bits, in FP4 rows 4.

INTELLECT-1 (arXiv 2412.01152), Table 2: compute utilization from the measured all-reduce and period.
"""

import re
from typing import Any

import pandas as pd

from lowband.cost.seldom import needed_rate, utilization
from lowband.evidence.validation import reported
from lowband.spec.config import Config

CSV = "11_low_communication.csv"
LAYERS_PER_FRAGMENT = 3
BACKWARD = 2 / 3  # of a step: twice the FLOPs of the forward


def low_communication(config: Config) -> pd.DataFrame:
    """One row per published number: predicted, and factor, the larger of both over the smaller."""
    printed = reported(config, CSV)
    rows = [_rate(row) for row in printed[printed["arxiv"] == "2501.18512"].itertuples()]
    of_prime = printed[printed["arxiv"] == "2412.01152"]
    rows += [_utilization(row, of_prime) for row in of_prime.itertuples() if _is_share(row)]
    table = pd.DataFrame(rows)
    table["factor"] = table[["published", "predicted"]].max(axis=1) / table[["published", "predicted"]].min(
        axis=1
    )
    return table


def _rate(row: Any) -> dict[str, object]:
    step_s, layers = float(row.step_s), int(row.layers)
    is_in_turn = row.system.startswith("Streaming")
    [percent] = re.findall(r"(\d+)% compute", row.metric)
    rate = needed_rate(
        bits=(4 if "FP4" in row.system else 16) * float(row.params_b) * 1e9,
        period_s=step_s * (1 if row.system == "Data-Parallel" else int(row.steps_per_period)),
        share=int(percent) / 100,
        fragments=layers // LAYERS_PER_FRAGMENT if is_in_turn else 1,
        hidden_s=step_s * (BACKWARD + ("overlapped" in row.system)),
    )
    return _row(row, f"Gbit/s for {percent} % utilization", rate / 1e9)


def _is_share(row: Any) -> bool:
    return row.metric.startswith("compute utilization") and "no communication" not in row.metric


def _utilization(row: Any, of_prime: pd.DataFrame) -> dict[str, object]:
    where = row.metric.partition(", ")[2]
    [reduce_s] = of_prime.loc[of_prime["metric"].str.endswith(f"pseudo-gradient, {where}"), "value"].astype(
        float
    )
    share = utilization(60 * float(row.period_min), reduce_s)
    return _row(row, f"% utilization, {where}", 100 * share)


def _row(row: Any, quantity: str, predicted: float) -> dict[str, object]:
    return {
        "provenance": "predicted",
        "arxiv": row.arxiv,
        "table": row.artifact,
        "system": row.system.partition(":")[0],
        "parameters": float(row.params_b) * 1e9,
        "quantity": quantity,
        "published": float(row.value),
        "predicted": predicted,
    }
