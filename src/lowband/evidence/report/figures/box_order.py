"""Throughput of the schemes in depth-first and breadth-first order against passes per optimizer step."""

import pandas as pd
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import ONE_COLUMN, by_scheme, canvas, legend_above, log_ticks

SUITE = "box-order"
RATE = "model_flop_per_s_per_rank_at_scale"
COLUMNS = [
    "suite", "scheme", "ranks", "accumulation", "order", "repeats", "step_time_s", "predicted_step_time_s",
    RATE, "over_depth",
]  # fmt: skip


def data(table: pd.DataFrame) -> pd.DataFrame:
    """The suite's points."""
    rows = table[table["suite"] == SUITE]
    return rows.reindex(columns=COLUMNS)


def draw(df: pd.DataFrame) -> Figure:
    figure = canvas(ONE_COLUMN, 2.9)
    axes = figure.subplots()
    for scheme, look, points in by_scheme(df, "accumulation"):
        for order, rows in points.groupby("order"):
            is_breadth = order == "breadth"
            axes.plot(
                rows["accumulation"], rows[RATE] / 1e12, color=look.color, marker=look.marker,
                linestyle="-" if is_breadth else ":", markerfacecolor=look.color if is_breadth else "white",
                label=f"{scheme}, {order}",
            )  # fmt: skip
    log_ticks(axes, df["accumulation"], "{:g}".format, "backward passes per optimizer step")
    axes.set_ylim(bottom=0)
    axes.set_ylabel("TFLOPS per GCD, at scale")
    legend_above(figure, axes, columns=2)
    return figure
