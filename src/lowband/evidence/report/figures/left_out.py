"""Predicted over published of rows left out, by source and kind of fold; bars: 80 % intervals."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from lowband.evidence.report.figures.style import (
    MOST_POINTS,
    TWO_COLUMNS,
    canvas,
    legend_above,
    one_line,
    spread,
)

MARKS = {"size": ("o", "0.2"), "scale": ("s", "0.5"), "machine": ("^", "0.75")}


def draw(df: pd.DataFrame) -> Figure:
    sources = list(dict.fromkeys(df["source"]))
    figure = canvas(TWO_COLUMNS, 2.9)
    axes = figure.subplots()
    one_line(axes)
    for i, (kind, (marker, colour)) in enumerate(MARKS.items()):
        rows = df[df["kind"] == kind]
        many = rows.groupby("source")["row"].transform("size") > MOST_POINTS
        for source in dict.fromkeys(rows.loc[many, "source"]):
            own = rows[rows["source"] == source]
            ratios = own["predicted"] / own["published"]
            spread(axes, sources.index(source) + 0.28 * (i - 1), ratios, colour)
        spans = rows.assign(middle=rows["source"].map(sources.index) + 0.28 * (i - 1))
        named = spans.dropna(subset="interval_factor").groupby("source")
        factors, places = named["interval_factor"].median(), named["middle"].first()
        axes.vlines(places, 1 / factors, factors, color="0.2", linewidth=0.8)
        rows = rows[~many]
        middle = rows["source"].map(sources.index).to_numpy(dtype=float) + 0.28 * (i - 1)
        within = rows.groupby("source").cumcount() / rows.groupby("source")["row"].transform("size")
        axes.plot(
            middle - 0.11 + 0.22 * within.to_numpy(), rows["predicted"] / rows["published"], marker,
            markersize=2.5, color=colour, markeredgewidth=0, label=f"without its {kind}",
        )  # fmt: skip
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticks([0.5, 0.7, 1, 1.4, 2], ["0.5", "0.7", "1", "1.4", "2"])
    axes.set_xticks(np.arange(len(sources)), sources, rotation=35, ha="right")
    axes.set_ylabel("predicted / published")
    axes.grid(axis="x", visible=False)
    legend_above(figure, axes, columns=3)
    return figure
