"""Faults injected into real runs, one row each (`make faults`).

detected_s  from the fault to the end of the run or the refusal; empty for a fault that a run must survive
is_right    whether all was as promised: exit code, line, outcome, and in the end the results of an
            undisturbed run; where it was not, `wrong` says what was not
"""

import pandas as pd

COLUMNS = [
    "provenance", "seed", "kind", "scheme", "ranks", "step", "detected_s", "resumed_from", "same_weights",
    "same_steps", "is_right", "wrong", "commit",
]  # fmt: skip


def build(injected: pd.DataFrame) -> pd.DataFrame:
    """injected: rows of results/reference/faults/injected.csv"""
    df = injected.assign(provenance="measured", is_right=injected["wrong"].isna())
    return df[COLUMNS].sort_values("seed", ignore_index=True)
