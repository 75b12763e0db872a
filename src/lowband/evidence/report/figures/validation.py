"""Predicted over published, one column of points per source; calibration rows open, held-out rows filled."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import TWO_COLUMNS, canvas, legend_above, one_line

BAND = 0.05
FILLS = {"calibration": "white", "held out": "0.2"}


def draw(df: pd.DataFrame) -> Figure:
    sources = list(dict.fromkeys(df["source"]))
    figure = canvas(TWO_COLUMNS, 2.9)
    axes = figure.subplots()
    one_line(axes, BAND)
    for use, fill in FILLS.items():
        rows = df[df["use"] == use]
        place = rows["source"].map(sources.index).to_numpy(dtype=float)
        # Rows of a source are side by side, in order.
        within = rows.groupby("source").cumcount() / rows.groupby("source")["row"].transform("size")
        axes.plot(
            place - 0.3 + 0.6 * within.to_numpy(), 1 + rows["error_percent"] / 100, "o", markersize=3.5,
            markerfacecolor=fill, markeredgecolor="0.2", markeredgewidth=0.7, label=use,
        )  # fmt: skip
    axes.set_xticks(np.arange(len(sources)), sources, rotation=35, ha="right")
    axes.set_ylabel("predicted / published")
    axes.grid(axis="x", visible=False)
    legend_above(figure, axes, columns=2)
    return figure
