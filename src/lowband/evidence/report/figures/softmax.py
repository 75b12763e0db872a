"""Time per value (left), three-pass over two-pass (right) against the size; a row per machine and ISA."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowband.cost.softmax import TWO_PASS
from lowband.evidence.report.figures.style import TWO_COLUMNS, band, canvas, legend_above, log_ticks
from lowband.spec.softmax import TORCH

COLUMNS = [
    "provenance", "cluster", "device", "isa", "algorithm", "regime", "array_bytes", "elements", "l1_bytes",
    "l2_bytes", "last_bytes", "time_s", "time_q20_s", "time_q80_s", "limit_s", "over_two_pass",
    "over_two_pass_q20", "over_two_pass_q80", "gain_percent",
]  # fmt: skip
_LOOKS: dict[str, dict[str, Any]] = {
    TWO_PASS: {"color": "#0173b2", "marker": "o", "linestyle": "-"},
    "three-pass recompute": {"color": "#d55e00", "marker": "s", "linestyle": "--"},
    "three-pass reload": {"color": "#029e73", "marker": "^", "linestyle": "-."},
    TORCH: {"color": "0.45", "marker": "x", "linestyle": ":"},
}
_CACHES = {"l1_bytes": "L1", "l2_bytes": "L2", "last_bytes": "last"}


def data(table: pd.DataFrame) -> pd.DataFrame:
    """Measured rows of our algorithms and torch's, with the reported gains; empty if there are none."""
    drawn = table.loc[table["algorithm"].isin(_LOOKS) & (table["status"] == "ok"), COLUMNS]
    return drawn if (drawn["provenance"] == "measured").any() else drawn.head(0)


def draw(df: pd.DataFrame) -> Figure:
    """A row of panels for each instruction set of a machine; panels in a column share their axes."""
    measured, reported = df[df["provenance"] == "measured"], df[df["provenance"] == "reported"]
    kinds = measured.loc[measured["algorithm"] == TWO_PASS, ["cluster", "isa"]].drop_duplicates()
    figure = canvas(TWO_COLUMNS, 0.9 + 2.1 * len(kinds))
    right_of_all = 2 * measured["array_bytes"].max()
    grid = figure.subplots(len(kinds), 2, squeeze=False, sharex=True, sharey="col")
    for (left, right), (cluster, isa) in zip(grid, kinds.itertuples(index=False), strict=True):
        here = measured[measured["cluster"] == cluster]
        rows = here[(here["isa"] == isa) | (here["algorithm"] == TORCH)]
        _times(left, rows)
        _ratios(right, rows[rows["isa"] == isa], reported[reported["isa"] == isa], right_of_all)
        for axes in (left, right):
            axes.set_title(f"{isa}, {rows['device'].iloc[0]}")
            _caches(axes, rows)
    top = max(2.0, 1.2 * measured["over_two_pass"].max())  # a band may exceed it
    grid[0, 1].set_ylim(0.4, top)
    for axes in grid[-1]:
        ticks = sorted(set(measured["array_bytes"]))[::4]
        log_ticks(axes, ticks, _size, "size of the input (the output is as large)")
    legend_above(figure, [grid[0, 0], *grid[:, 1]], columns=3)
    return figure


def _size(of: int) -> str:
    return f"{of / 2**20:g} MiB" if of >= 2**20 else f"{of / 2**10:g} KiB"


def _times(axes: Axes, df: pd.DataFrame) -> None:
    for name, look in _LOOKS.items():
        rows = df[df["algorithm"] == name].sort_values("elements")
        axes.plot(rows["array_bytes"], 1e9 * rows["time_s"] / rows["elements"], **look, label=name)
        if name == TWO_PASS:
            limit = "two-pass, its passes without arithmetic"
            per_value = 1e9 * rows["limit_s"] / rows["elements"]
            axes.plot(rows["array_bytes"], per_value, color="0.2", linewidth=0.8, label=limit)
    axes.set_yscale("log")
    axes.set_ylabel("time per value (ns)")


def _ratios(axes: Axes, df: pd.DataFrame, reported: pd.DataFrame, right_of_all: float) -> None:
    for name, look in _LOOKS.items():
        rows = df[(df["algorithm"] == name) & (name != TWO_PASS)].sort_values("elements")
        if len(rows):
            axes.plot(rows["array_bytes"], rows["over_two_pass"], **look)
            band(axes, rows, "array_bytes", "over_two_pass_q20", "over_two_pass_q80", look["color"])
    for gain, device in zip(reported["gain_percent"], reported["device"], strict=True):
        label = f"reported: up to, on {device}"
        axes.plot(right_of_all, 1 + gain / 100, "*", markersize=9, color="black", label=label)
    axes.axhline(1, color="0.2", linewidth=0.8)
    axes.set_ylabel("three-pass / two-pass")


def _caches(axes: Axes, df: pd.DataFrame) -> None:
    for column, name in _CACHES.items():
        size = df[column].iloc[0]
        axes.axvline(size, color="0.6", linewidth=0.8, linestyle=":")
        axes.annotate(
            name, (size, 0.01), xycoords=("data", "axes fraction"), xytext=(2, 0), textcoords="offset points",
            fontsize=6, color="0.4",
        )  # fmt: skip
