"""Predicted over published, one column of points per source; of many rows quantiles."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import (
    MOST_POINTS,
    TWO_COLUMNS,
    canvas,
    legend_above,
    one_line,
    spread,
)
from lowband.evidence.validation import CALIBRATION, ERRORS_SEEN, HELD_OUT

BAND = 0.05
FILLS = {CALIBRATION: "white", ERRORS_SEEN: "0.7", HELD_OUT: "0.2"}


def draw(df: pd.DataFrame) -> Figure:
    sources = list(dict.fromkeys(df["source"]))
    figure = canvas(TWO_COLUMNS, 2.9)
    axes = figure.subplots()
    one_line(axes, BAND)
    many = df.groupby("source")["row"].transform("size") > MOST_POINTS
    for use, fill in FILLS.items():
        rows = df[(df["use"] == use) & ~many]
        place = rows["source"].map(sources.index).to_numpy(dtype=float)
        # Rows of a source are side by side, in order.
        within = rows.groupby("source").cumcount() / rows.groupby("source")["row"].transform("size")
        axes.plot(
            place - 0.3 + 0.6 * within.to_numpy(), 1 + rows["error_percent"] / 100, "o", markersize=3.5,
            markerfacecolor=fill, markeredgecolor="0.2", markeredgewidth=0.7, label=use,
        )  # fmt: skip
    for source in dict.fromkeys(df.loc[many, "source"]):
        spread(axes, sources.index(source), 1 + df.loc[df["source"] == source, "error_percent"] / 100, "0.2")
    axes.set_xticks(np.arange(len(sources)), sources, rotation=35, ha="right")
    axes.set_ylabel("predicted / published")
    axes.grid(axis="x", visible=False)
    legend_above(figure, axes, columns=3)
    return figure
