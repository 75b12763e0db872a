"""Time and memory of commands that must bear many runs, by size (`python -m tests.load`), and their goals.

size      runs of the suite that is planned, runs of 1,000 steps that are collected, lines that are imported
cpu_s     processor time of the command and of all that it started
limit_s, limit_bytes  goals at this size; empty for others, and where no goal is set
"""

import pandas as pd

from lowband.cost.numbers import GIB

COLUMNS = [
    "provenance", "part", "size", "input_bytes", "cpu_s", "wall_s", "peak_bytes", "limit_s", "limit_bytes",
    "commit",
]  # fmt: skip
# part -> size, seconds, bytes
GOALS: dict[str, tuple[int, float, float | None]] = {
    "plan": (2_000, 60.0, None),
    "collect": (10_000, 120.0, 2.0 * GIB),
    "import-log": (1_000_000, 10.0, None),
}


def build(load: pd.DataFrame) -> pd.DataFrame:
    """load: rows of results/reference/load/load.csv"""
    goals = pd.DataFrame(
        [(part, *goal) for part, goal in GOALS.items()],
        columns=["part", "size", "limit_s", "limit_bytes"],
    )
    return load.assign(provenance="measured").merge(goals, on=["part", "size"], how="left")[COLUMNS]
