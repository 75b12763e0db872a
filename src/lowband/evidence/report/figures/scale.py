"""TFLOPS per GCD against ranks, one line per scheme; links between nodes at their rate, and slower."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import (
    TWO_COLUMNS,
    End,
    band,
    by_scheme,
    canvas,
    label_ends,
    log_ticks,
)


def draw(df: pd.DataFrame) -> Figure:
    figure = canvas(TWO_COLUMNS, 2.8)
    panels = figure.subplots(1, df["slower"].nunique(), sharey=True, squeeze=False)[0]
    ends = [_lines(axes, rows) for axes, (_, rows) in zip(panels, df.groupby("slower"), strict=True)]
    for axes, slower, lines in zip(panels, sorted(df["slower"].unique()), ends, strict=True):
        title = "Frontier's links" if slower == 1 else f"between nodes {slower} times slower"
        axes.set_title(title, loc="left")
        label_ends(axes, lines, 2.2)
    panels[0].set_ylabel("TFLOPS per GCD")
    return figure


def _lines(axes: Axes, rows: pd.DataFrame) -> list[End]:
    ends = []
    for scheme, look, line in by_scheme(rows, "ranks"):
        band(axes, line, "ranks", "tflops_per_gpu_slow", "tflops_per_gpu_fast", look.color)
        axes.plot(line["ranks"], line["tflops_per_gpu"], **look.line)
        ends.append(End(scheme, line["ranks"].iloc[-1], line["tflops_per_gpu"].iloc[-1], look.color))
    log_ticks(axes, [8, 64, 512, 4096, 75264], "{:,}".format, "GCDs")
    axes.set_ylim(bottom=0)
    return ends
