"""Share of rows left out that lie in their interval: against what intervals state, and by machine at 80 %."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowband.evidence.report.figures.left_out import MARKS
from lowband.evidence.report.figures.style import TWO_COLUMNS, canvas, legend_above
from lowband.evidence.tables.derived.coverage import ALL
from lowband.evidence.validation.intervals import LEVEL

AIM = (75, 85)  # percent of rows in intervals of 80 %


def data(table: pd.DataFrame) -> pd.DataFrame:
    """All rows at every level, and machines at LEVEL."""
    of_all = table["cluster"] == ALL
    return table[of_all | (table["level"] == LEVEL)]


def draw(df: pd.DataFrame) -> Figure:
    figure = canvas(TWO_COLUMNS, 2.9)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.5), sharey=True)
    _levels(left, df[df["cluster"] == ALL])
    _machines(right, df[df["cluster"] != ALL])
    left.set_ylabel("rows inside (%)")
    left.set_ylim(-4, 104)
    legend_above(figure, left, columns=4)
    return figure


def _levels(axes: Axes, df: pd.DataFrame) -> None:
    for kind, (marker, colour) in MARKS.items():
        rows = df[df["kind"] == kind]
        stated, inside = 100 * rows["level"], 100 * rows["inside"]
        axes.plot(stated, inside, marker=marker, color=colour, markersize=4, label=f"without its {kind}")
    axes.plot((0, 100), (0, 100), color="0.2", linewidth=0.8, linestyle=":", label="as stated")
    axes.vlines(100 * LEVEL, *AIM, color="0.85", linewidth=7, zorder=0)
    axes.set_xlim(45, 95)
    axes.set_xlabel("stated by the interval (%)")


def _machines(axes: Axes, df: pd.DataFrame) -> None:
    names = df["cluster"] + np.where(df["unit"] == "memory", ", memory", "")
    places = list(dict.fromkeys(names))
    axes.axhspan(*AIM, color="0.85", linewidth=0, zorder=0)
    for i, (kind, (marker, colour)) in enumerate(MARKS.items()):
        rows = df[df["kind"] == kind]
        x = names[rows.index].map(places.index).to_numpy(dtype=float) + 0.2 * (i - 1)
        axes.plot(x, 100 * rows["inside"], marker, color=colour, markersize=4, markeredgewidth=0)
    axes.set_xticks(np.arange(len(places)), places, rotation=35, ha="right")
    axes.grid(axis="x", visible=False)
