"""The core experiment: TFLOPS per GCD (left), efficiency (middle), and where a step's time goes (right)."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowband.report.figures.style import TWO_COLUMNS, canvas, legend_above, looks, rank_ticks, shades

SUITE = "box"
COLUMNS = [
    "cluster", "model", "tokens_per_rank", "scale", "scheme", "ranks", "repeats", "links",
    "model_flop_per_s_per_rank_at_scale", "step_time_s", "step_time_min_s", "step_time_max_s", "base_ranks",
    "efficiency", "compute_time_s", "exposed_comm_time_s",
]  # fmt: skip


def data(table: pd.DataFrame) -> pd.DataFrame:
    """The suite's points."""
    return table.loc[table["suite"] == SUITE, COLUMNS]


def draw(df: pd.DataFrame) -> Figure:
    figure = canvas(TWO_COLUMNS, 2.6)
    left, middle, right = figure.subplots(1, 3)
    for scheme, look in looks(df["scheme"]).items():
        line = df[df["scheme"] == scheme].sort_values("ranks")
        value = line["model_flop_per_s_per_rank_at_scale"].to_numpy() / 1e12
        slow_and_fast = line[["step_time_max_s", "step_time_min_s"]].to_numpy().T
        spread = np.abs(value * line["step_time_s"].to_numpy() / slow_and_fast - value)
        style = {
            "marker": look.marker,
            "linestyle": look.dash,
            "color": look.color,
            "markerfacecolor": "white",
        }
        left.errorbar(line["ranks"], value, spread, elinewidth=0.7, label=scheme, **style)
        middle.plot(line["ranks"], line["efficiency"], **style)
    left.set_ylabel(f"TFLOPS per GCD (measured x {df['scale'].iloc[0]:,.0f})")
    left.set_ylim(bottom=0)
    middle.axhline(1, color="0.3", linestyle=":", linewidth=0.8)
    middle.set_ylim(bottom=0)
    middle.set_ylabel(f"efficiency (base: {int(df['base_ranks'].min())} ranks)")
    for axes in (left, middle):
        rank_ticks(axes, df["ranks"])
    _split(right, df[df["ranks"] == df["ranks"].max()])
    legend_above(figure, left, columns=5)
    return figure


def _split(axes: Axes, rows: pd.DataFrame) -> None:
    """Stacked bars of a step's time, one per scheme."""
    parts = {"compute_time_s": "computing", "exposed_comm_time_s": "waiting"}
    bottom = np.zeros(len(rows))
    for (column, label), (color, hatch) in zip(parts.items(), shades(list(parts)).values(), strict=True):
        height = rows[column].to_numpy()
        axes.bar(
            rows["scheme"], height, bottom=bottom, color=color, hatch=hatch, edgecolor="white", linewidth=0,
            width=0.7, label=label,
        )  # fmt: skip
        bottom = bottom + height
    axes.set_ylim(0, 1.25 * bottom.max())
    axes.set_ylabel(f"seconds of a step, {int(rows['ranks'].iloc[0])} ranks")
    axes.grid(axis="x", visible=False)
    axes.legend(loc="upper right", ncols=1)
    for name in axes.get_xticklabels():
        name.set(rotation=50, ha="right", rotation_mode="anchor")
