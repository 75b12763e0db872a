"""Step time on flat rings and level by level, with and without overlap."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import TWO_COLUMNS, canvas, legend_above, shades

SUITE = "box-hops"
LABELS = {"flat": "flat rings", "hops": "level by level"}
COLUMNS = [
    "suite", "scheme", "ranks", "overlap", "collectives", "repeats", "step_time_s", "step_time_min_s",
    "step_time_max_s", "predicted_step_time_s", "over_flat",
]  # fmt: skip


def data(table: pd.DataFrame) -> pd.DataFrame:
    """The suite's points."""
    return table[table["suite"] == SUITE].reindex(columns=COLUMNS)


def draw(df: pd.DataFrame) -> Figure:
    figure = canvas(TWO_COLUMNS, 2.4)
    panels = figure.subplots(1, df["overlap"].nunique(), sharey=True, squeeze=False)[0]
    for axes, (overlap, rows) in zip(panels, df.groupby("overlap"), strict=True):
        _bars(axes, rows)
        axes.set_title("with overlap" if overlap else "without overlap", loc="left")
    panels[0].set_ylabel("seconds of a step")
    legend_above(figure, panels[0], columns=3)
    return figure


def _bars(axes: Axes, rows: pd.DataFrame) -> None:
    slowest_first = rows.groupby("scheme")["step_time_s"].max().sort_values(ascending=False)
    schemes = list(slowest_first.index)
    width = 0.36
    for i, (kind, (color, hatch)) in enumerate(shades(list(LABELS)).items()):
        line = rows[rows["collectives"] == kind].set_index("scheme").reindex(schemes)
        place = np.arange(len(schemes)) + (i - 0.5) * width
        time = line["step_time_s"]
        spread = [time - line["step_time_min_s"], line["step_time_max_s"] - time]
        axes.bar(
            place, time, width, yerr=spread, color=color, hatch=hatch, edgecolor="white", linewidth=0,
            error_kw={"elinewidth": 0.7}, label=LABELS[kind],
        )  # fmt: skip
        axes.hlines(
            line["predicted_step_time_s"], place - width / 2, place + width / 2, colors="black",
            linewidth=1.2, label="predicted" if i else "_nolegend_",
        )  # fmt: skip
    axes.set_xticks(np.arange(len(schemes)), schemes)
    axes.grid(axis="x", visible=False)
