"""The core experiment: TFLOPS per GCD (left) and scaling efficiency (right)."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import (
    TWO_COLUMNS,
    End,
    by_scheme,
    canvas,
    label_ends,
    one_line,
    rank_ticks,
)

MOST_RANKS = 16  # that two cores bear (docs/scale-model.md): beyond, an efficiency is the host's too


def draw(df: pd.DataFrame) -> Figure:
    figure = canvas(TWO_COLUMNS, 2.6)
    left, right = figure.subplots(1, 2)
    ends: list[End] = []
    for scheme, look, line in by_scheme(df, "ranks"):
        value = line["model_flop_per_s_per_rank_at_scale"].to_numpy() / 1e12
        slow_and_fast = line[["step_time_max_s", "step_time_min_s"]].to_numpy().T
        spread = np.abs(value * line["step_time_s"].to_numpy() / slow_and_fast - value)
        left.errorbar(line["ranks"], value, spread, elinewidth=0.7, **look.line)
        efficiency, many = line["efficiency"].to_numpy(), int((line["ranks"] <= MOST_RANKS).sum())
        ranks, around = line["ranks"].to_numpy(), spread * efficiency / value
        right.errorbar(ranks[:many], efficiency[:many], around[:, :many], elinewidth=0.7, **look.line)
        pale = {**look.line, "alpha": 0.35}
        right.errorbar(ranks[-2:], efficiency[-2:], around[:, -2:], elinewidth=0.7, **pale)
        ends.append(End(scheme, line["ranks"].iloc[-1], line["efficiency"].iloc[-1], look.color))
    left.set_ylabel(f"TFLOPS per GCD (measured x {df['scale'].iloc[0]:,.0f})")
    one_line(right)
    right.set_ylabel(f"efficiency (base: {int(df['base_ranks'].min())} ranks)")
    left.set_ylim(0, 1.06 * left.dataLim.ymax)
    right.set_ylim(min(0.7, 0.9 * df["efficiency"].min()), 1.03)  # room for a line of text below
    for axes in (left, right):
        rank_ticks(axes, df["ranks"])
        if df["ranks"].max() > MOST_RANKS:
            axes.axvspan(1.4 * MOST_RANKS, df["ranks"].max() * 1.1, color="0.93", zorder=0, linewidth=0)
            axes.annotate(
                "too many for two cores", (0.98, 0.04), xycoords="axes fraction", ha="right", color="0.4"
            )
    label_ends(right, ends, 1.9)
    return figure
