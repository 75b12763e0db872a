"""Step times of the scale model: measured over predicted from the box's rates."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

from lowband.evidence.report.figures.style import ONE_COLUMN, by_scheme, canvas, legend_above, one_line

BAND = 0.05


def draw(df: pd.DataFrame) -> Figure:
    figure = canvas(ONE_COLUMN, 2.6)
    axes = figure.subplots()
    one_line(axes, BAND)
    most = df["ranks"].max()
    for scheme, look, points in by_scheme(df, "ranks"):
        for is_most, rows in points.groupby(points["ranks"] == most):
            predicted, median = rows["predicted_step_time_s"], rows["measured_over_predicted"]
            around = [
                (median - rows["step_time_min_s"] / predicted).abs(),
                (rows["step_time_max_s"] / predicted - median).abs(),
            ]
            axes.errorbar(
                predicted, median, around, elinewidth=0.7, marker=look.marker, linestyle="",
                color=look.color, markerfacecolor=look.color if is_most else "white",
                label=None if is_most else scheme,
            )  # fmt: skip
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("predicted step time (s)")
    axes.set_ylabel("measured / predicted")
    axes.set_title(f"filled: {most} ranks")
    legend_above(figure, axes, columns=3)
    return figure
