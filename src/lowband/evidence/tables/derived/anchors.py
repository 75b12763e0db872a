"""The same faults in jobs of lowband and of its peers, one row each (`python -m tests.anchors faults`).

detected_s  from the fault until the job had ended, or went on by itself; empty if it still hung after 120 s
told        whether what is printed names the victim and the cause
lines       printed after the fault
lost_steps  between the last recorded step and the checkpoint from which the job went on
same_end    whether losses and final weights are those of an undisturbed run of the same system, bit by bit
"""

import pandas as pd

COLUMNS = [
    "provenance", "system", "fault", "ranks", "repeat", "detected_s", "told", "lines", "lost_steps",
    "same_end", "commit",
]  # fmt: skip


def build(anchor_faults: pd.DataFrame) -> pd.DataFrame:
    """anchor_faults: rows of results/reference/anchors/anchor_faults.csv"""
    df = anchor_faults.assign(provenance="measured")
    return df[COLUMNS].sort_values(["fault", "system", "ranks", "repeat"], ignore_index=True)
