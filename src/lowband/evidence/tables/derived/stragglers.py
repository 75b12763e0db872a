"""Runs with a slow rank or link, and as many without, one row each (`python -m tests.stragglers`).

is_faulty  whether something was slow
named      what the run's outcome named as slow; empty if nothing
is_right   whether it named what was slow and nothing else
"""

import pandas as pd

COLUMNS = [
    "provenance", "seed", "kind", "is_faulty", "victim", "level", "factor", "scheme", "ranks", "node",
    "named", "is_right", "real_share", "commit",
]  # fmt: skip


def build(trials: pd.DataFrame) -> pd.DataFrame:
    """trials: rows of results/reference/stragglers/trials.csv"""
    df = trials.assign(provenance="measured", is_faulty=trials["kind"] != "none")
    return df[COLUMNS].sort_values(["seed", "is_faulty"], ignore_index=True)
