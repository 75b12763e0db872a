"""The core experiment: TFLOPS per GCD (left) and scaling efficiency (right)."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import (
    TWO_COLUMNS,
    by_scheme,
    canvas,
    legend_above,
    one_line,
    rank_ticks,
)

SUITE = "box"
COLUMNS = [
    "cluster", "model", "tokens_per_rank", "scale", "scheme", "ranks", "repeats", "links",
    "model_flop_per_s_per_rank_at_scale", "step_time_s", "step_time_min_s", "step_time_max_s", "base_ranks",
    "efficiency",
]  # fmt: skip


def data(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the suite's points."""
    return table.loc[table["suite"] == SUITE, COLUMNS]


def draw(df: pd.DataFrame) -> Figure:
    figure = canvas(TWO_COLUMNS, 2.6)
    left, right = figure.subplots(1, 2)
    for scheme, look, line in by_scheme(df, "ranks"):
        value = line["model_flop_per_s_per_rank_at_scale"].to_numpy() / 1e12
        slow_and_fast = line[["step_time_max_s", "step_time_min_s"]].to_numpy().T
        spread = np.abs(value * line["step_time_s"].to_numpy() / slow_and_fast - value)
        left.errorbar(line["ranks"], value, spread, elinewidth=0.7, label=scheme, **look.line)
        right.plot(line["ranks"], line["efficiency"], **look.line)
    left.set_ylabel(f"TFLOPS per GCD (measured x {df['scale'].iloc[0]:,.0f})")
    one_line(right)
    right.set_ylabel(f"efficiency (base: {int(df['base_ranks'].min())} ranks)")
    for axes in (left, right):
        axes.set_ylim(0, 1.06 * axes.dataLim.ymax)
        rank_ticks(axes, df["ranks"])
    legend_above(figure, left, columns=5)
    return figure
