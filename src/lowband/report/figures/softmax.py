"""Time per value (left), three-pass over two-pass (right) against the vector's size; by instruction set."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from lowband.cost.softmax import TWO_PASS
from lowband.report.figures.style import TWO_COLUMNS, canvas, legend_above
from lowband.spec.softmax import TORCH

COLUMNS = [
    "provenance", "device", "isa", "algorithm", "regime", "array_bytes", "elements", "l1_bytes", "l2_bytes",
    "last_bytes", "time_s", "time_q20_s", "time_q80_s", "limit_s", "over_two_pass", "over_two_pass_q20",
    "over_two_pass_q80", "gain_percent",
]  # fmt: skip
_LOOKS = {
    TWO_PASS: ("#0173b2", "o", "-"),
    "three-pass recompute": ("#d55e00", "s", "--"),
    "three-pass reload": ("#029e73", "^", "-."),
    TORCH: ("0.45", "x", ":"),
}
_CACHES = {"l1_bytes": "L1", "l2_bytes": "L2", "last_bytes": "last"}


def data(table: pd.DataFrame) -> pd.DataFrame:
    """What was measured of the algorithms and torch's, with the reported gains; else nothing."""
    drawn = table.loc[table["algorithm"].isin(_LOOKS) & (table["status"] == "ok"), COLUMNS]
    return drawn if (drawn["provenance"] == "measured").any() else drawn.head(0)


def draw(df: pd.DataFrame) -> Figure:
    measured, reported = df[df["provenance"] == "measured"], df[df["provenance"] == "reported"]
    isas = measured.loc[measured["algorithm"] == TWO_PASS, "isa"].unique()
    figure = canvas(TWO_COLUMNS, 0.5 + 2.5 * len(isas))
    grid = figure.subplots(len(isas), 2, squeeze=False)
    for (left, right), isa in zip(grid, isas, strict=True):
        rows = measured[(measured["isa"] == isa) | (measured["algorithm"] == TORCH)]
        _times(left, rows)
        _ratios(right, rows[rows["isa"] == isa], reported[reported["isa"] == isa])
        left.set_title(f"{isa}, {rows['device'].iloc[0]}")
        right.set_title(f"{isa}, {rows['device'].iloc[0]}")
    legend_above(figure, grid[0, 0], columns=3)
    return figure


def _times(axes: Axes, df: pd.DataFrame) -> None:
    for name, (color, marker, dash) in _LOOKS.items():
        rows = df[df["algorithm"] == name].sort_values("elements")
        per_value = {column: 1e9 * rows[column] / rows["elements"] for column in ("time_s", "limit_s")}
        axes.plot(
            rows["array_bytes"], per_value["time_s"], color=color, marker=marker, linestyle=dash, label=name
        )
        if name == TWO_PASS:
            axes.plot(
                rows["array_bytes"], per_value["limit_s"], color="0.2", linewidth=0.8,
                label="two-pass, its passes without arithmetic",
            )  # fmt: skip
    axes.set_yscale("log")
    axes.set_ylabel("time per value (ns)")
    _sizes(axes, df)


def _ratios(axes: Axes, df: pd.DataFrame, reported: pd.DataFrame) -> None:
    for name, (color, marker, dash) in _LOOKS.items():
        rows = df[(df["algorithm"] == name) & (name != TWO_PASS)].sort_values("elements")
        if len(rows):
            axes.plot(rows["array_bytes"], rows["over_two_pass"], color=color, marker=marker, linestyle=dash)
            axes.fill_between(
                rows["array_bytes"], rows["over_two_pass_q20"], rows["over_two_pass_q80"],
                color=color, alpha=0.15, linewidth=0,
            )  # fmt: skip
    for gain, device in zip(reported["gain_percent"], reported["device"], strict=True):
        axes.plot(
            2 * df["array_bytes"].max(), 1 + gain / 100, marker="*", markersize=9, color="black",
            linestyle="", label=f"reported: up to, on {device}",
        )  # fmt: skip
    axes.legend(loc="upper left")
    axes.set_ylim(0.4, max(2.0, 1.2 * df["over_two_pass"].max()))  # a band may go beyond
    axes.axhline(1, color="0.2", linewidth=0.8)
    axes.set_ylabel("time of three-pass / two-pass")
    _sizes(axes, df)


def _sizes(axes: Axes, df: pd.DataFrame) -> None:
    """Sizes of the input as an axis, and where the caches end."""
    axes.set_xscale("log", base=2)
    ticks = sorted(set(df["array_bytes"]))[::4]
    axes.set_xticks(ticks, [f"{t / 2**20:g} MiB" if t >= 2**20 else f"{t / 2**10:g} KiB" for t in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("size of the input (the output is as large)")
    for column, name in _CACHES.items():
        size = df[column].iloc[0]
        axes.axvline(size, color="0.6", linewidth=0.8, linestyle=":")
        axes.annotate(
            name, (size, 0.01), xycoords=("data", "axes fraction"), xytext=(2, 0), textcoords="offset points",
            fontsize=6, color="0.4",
        )  # fmt: skip
