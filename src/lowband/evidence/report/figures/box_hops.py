"""Step time on flat rings and hop by hop, with and without overlap."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import (
    TWO_COLUMNS,
    canvas,
    in_order,
    legend_above,
    scheme_ticks,
    shades,
)

LABELS = {"flat": "flat rings", "hops": "hop by hop"}


def draw(df: pd.DataFrame) -> Figure:
    figure = canvas(TWO_COLUMNS, 1.9)
    panels = figure.subplots(1, df["overlap"].nunique(), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (overlap, rows) in zip(panels, df.groupby("overlap"), strict=True):
        _bars(axes, rows)
        axes.set_title("with overlap" if overlap else "without overlap", loc="left")
    legend_above(figure, panels[0], columns=3)
    return figure


def _bars(axes: Axes, rows: pd.DataFrame) -> None:
    schemes = in_order(rows["scheme"])
    width = 0.36
    for i, (kind, color) in enumerate(shades(list(LABELS)).items()):
        line = rows[rows["collectives"] == kind].set_index("scheme").reindex(schemes)
        place = np.arange(len(schemes)) + (i - 0.5) * width
        time = line["step_time_s"]
        spread = [time - line["step_time_min_s"], line["step_time_max_s"] - time]
        axes.barh(
            place, time, width, xerr=spread, color=color, linewidth=0, error_kw={"elinewidth": 0.7},
            label=LABELS[kind],
        )  # fmt: skip
        axes.vlines(
            line["predicted_step_time_s"], place - width / 2, place + width / 2, colors="black",
            linewidth=1.2, label="predicted" if i else "_nolegend_",
        )  # fmt: skip
    scheme_ticks(axes, schemes)
    axes.set_ylim(len(schemes) - 0.5, -0.5)
    axes.set_xlabel("seconds of a step")
    axes.grid(axis="y", visible=False)
