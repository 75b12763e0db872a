"""Throughput ratios over batch and achieved bandwidth: hier3 to ZeRO++ (left), ZeRO++ to ZeRO-3 (right)."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import TWO_COLUMNS, canvas, log_ticks

PANELS = {"ratio_hier3_zeropp": "hier3 / ZeRO++", "ratio_zeropp_zero3": "ZeRO++ / ZeRO-3"}


def data(table: pd.DataFrame) -> pd.DataFrame:
    """The one case in which the published ratios hold somewhere: the fitted rate in a node, no overlap."""
    return table[(table["links_in_node"] == "fitted") & (table["overlap"] == 0)]


def draw(df: pd.DataFrame) -> Figure:
    figure = canvas(TWO_COLUMNS, 2.8)
    for axes, (column, title) in zip(figure.subplots(1, 2, sharey=True), PANELS.items(), strict=True):
        _panel(figure, axes, df, column, title)
    return figure


def _panel(figure: Figure, axes: Axes, df: pd.DataFrame, column: str, title: str) -> None:
    def grid(name: str) -> pd.DataFrame:
        return df.pivot_table(index="node_gigabytes_per_s", columns="batch_per_gcd", values=name)

    values, holds = grid(column), grid("holds")
    x, y = values.columns.to_numpy(dtype=float), values.index.to_numpy(dtype=float)
    drawn = axes.contourf(x, y, values, levels=np.linspace(0.7, 2.6, 20), cmap="viridis", extend="both")
    axes.contourf(x, y, holds, levels=[0.5, 1.5], colors="none", hatches=["////"])
    point = df.iloc[0]
    axes.plot(point["point_batch_per_gcd"], point["point_node_gigabytes_per_s"], "x", color="red")
    axes.set_yscale("log")
    log_ticks(axes, x, "{:g}".format, "sequences per GCD and step (micro-batch 1)")
    axes.set_ylabel("reached between nodes, GB/s a node")
    axes.set_title(title, loc="left")
    figure.colorbar(drawn, ax=axes, format="%.1f")
