"""TFLOPS per GCD against ranks, one line per scheme; links between nodes at their rate, and slower."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from lowband.report.figures.style import TWO_COLUMNS, canvas, legend_above, looks


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
    for scheme, look in looks(rows["scheme"]).items():
        line = rows[rows["scheme"] == scheme].sort_values("ranks")
        axes.fill_between(
            line["ranks"], line["tflops_per_gpu_slow"], line["tflops_per_gpu_fast"], color=look.color,
            alpha=0.15, linewidth=0,
        )  # fmt: skip
        axes.plot(
            line["ranks"], line["tflops_per_gpu"], marker=look.marker, linestyle=look.dash, color=look.color,
            markerfacecolor="white", label=scheme,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    ticks = [8, 64, 512, 4096, 75264]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("GCDs")
    axes.set_ylim(bottom=0)
