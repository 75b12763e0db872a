"""Throughput ratios over batch and achieved bandwidth: hier3 to ZeRO++ (left), ZeRO++ to ZeRO-3 (right)."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.contour import QuadContourSet
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from lowband.evidence.report.figures.style import TWO_COLUMNS, canvas, log_ticks

PANELS = {"ratio_hier3_zeropp": "hier3 / ZeRO++", "ratio_zeropp_zero3": "ZeRO++ / ZeRO-3"}
MOST = 2.6  # of the colours


def draw(df: pd.DataFrame) -> Figure:
    figure = canvas(TWO_COLUMNS, 2.8)
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (column, title) in zip(panels, PANELS.items(), strict=True):
        drawn = _panel(axes, df, column, title)
    bar = figure.colorbar(drawn, ax=panels)
    bar.set_ticks([0.5, 1, 1.5, 2, 2.5], labels=["0.5", "1", "1.5", "2", "2.5"])
    bar.minorticks_off()
    return figure


def _panel(axes: Axes, df: pd.DataFrame, column: str, title: str) -> QuadContourSet:
    def grid(name: str) -> pd.DataFrame:
        return df.pivot_table(index="node_gigabytes_per_s", columns="batch_per_gcd", values=name)

    values, holds = grid(column), grid("holds")
    x, y = values.columns.to_numpy(dtype=float), values.index.to_numpy(dtype=float)
    # A factor and its inverse are equally far from the white of 1.
    levels = np.geomspace(1 / MOST, MOST, 21)
    norm = LogNorm(1 / MOST, MOST)
    drawn = axes.contourf(x, y, values, levels=levels, norm=norm, cmap="RdBu_r", extend="both")
    reported = df[f"published_{column}"].iloc[0]
    axes.contour(x, y, values, levels=[reported], colors="black", linewidths=1.2)
    axes.contourf(x, y, holds, levels=[0.5, 1.5], colors="none", hatches=["////"])
    point = df.iloc[0]
    axes.plot(point["point_batch_per_gcd"], point["point_node_gigabytes_per_s"], "x", color="red")
    axes.set_yscale("log")
    log_ticks(axes, x, "{:g}".format, "sequences per GCD and step (micro-batch 1)")
    axes.set_ylabel("reached between nodes, GB/s a node")
    axes.set_title(f"{title}; line: {reported:g}, as reported", loc="left")
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    return drawn
