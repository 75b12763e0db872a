"""TFLOPS per GCD against ranks, one line per scheme; links between nodes at their rate, and slower."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import (
    TWO_COLUMNS,
    band,
    by_scheme,
    canvas,
    legend_above,
    log_ticks,
)


def data(table: pd.DataFrame) -> pd.DataFrame:
    """The rows that fit the device's memory."""
    return table[table["fits"]]


def draw(df: pd.DataFrame) -> Figure:
    figure = canvas(TWO_COLUMNS, 3.0)
    panels = figure.subplots(1, df["slower"].nunique(), sharey=True, squeeze=False)[0]
    for axes, (slower, rows) in zip(panels, df.groupby("slower"), strict=True):
        _lines(axes, rows)
        axes.set_title(
            "Frontier's links" if slower == 1 else f"between nodes {slower} times slower", loc="left"
        )
    panels[0].set_ylabel("TFLOPS per GCD")
    legend_above(figure, panels[0], columns=5)
    return figure


def _lines(axes: Axes, rows: pd.DataFrame) -> None:
    for scheme, look, line in by_scheme(rows, "ranks"):
        band(axes, line, "ranks", "tflops_per_gpu_slow", "tflops_per_gpu_fast", look.color)
        axes.plot(line["ranks"], line["tflops_per_gpu"], **look.line, label=scheme)
    log_ticks(axes, [8, 64, 512, 4096, 75264], "{:,}".format, "GCDs")
    axes.set_ylim(bottom=0)
