"""Predicted throughput of every placement and order against its peak memory, on two stacks."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowband.cost.numbers import GIB
from lowband.evidence.report.figures.style import TWO_COLUMNS, canvas, legend_above, log_ticks, looks

PANELS = {
    "deepspeed-zero": "collectives as ZeRO's reached, none hidden",
    "ours": "published link rates, all hidden that can be",
}
NAMED = {"zero3": "ZeRO-3", "zeropp": "ZeRO++", "hier3": "hier3", "planned": "the planner's choice"}
TICKS = (8, 16, 32, 64, 128, 256)


def draw(df: pd.DataFrame) -> Figure:
    figure = canvas(TWO_COLUMNS, 3.4)
    panels = figure.subplots(1, len(PANELS), sharey=True)
    for axes, (stack, title) in zip(panels, PANELS.items(), strict=True):
        _panel(axes, df[df["stack"] == stack].assign(gib=df["peak_memory_bytes"] / GIB))
        axes.set_title(title, loc="left")
    panels[0].set_ylabel("TFLOPS per GCD, predicted")
    panels[0].set_ylim(0, 1.3 * df["tflops_per_gpu"].max())  # room for the labels of the Pareto line
    legend_above(figure, panels[0], columns=4)
    return figure


def _panel(axes: Axes, rows: pd.DataFrame) -> None:
    limit = rows["memory_gib"].iloc[0]
    axes.axvline(limit, color="0.3", linestyle="--", linewidth=0.8, label=f"a GCD's {limit:g} GiB")
    best = rows[rows["pareto"]].sort_values("gib")
    axes.step(
        [*best["gib"], limit], [*best["tflops_per_gpu"], best["tflops_per_gpu"].max()], where="post",
        color="black", linewidth=0.9, label="Pareto line",
    )  # fmt: skip
    for _, row in best[best["order"] == "breadth"].iterrows():
        placed = "/".join(row[["weights", "secondary"]].dropna())
        axes.annotate(
            placed, (row["gib"], row["tflops_per_gpu"]), (0, 6), textcoords="offset points", rotation=90,
            fontsize=7, ha="center", va="bottom",
        )  # fmt: skip
    for order, filled in (("depth", False), ("breadth", True)):
        others = rows[(rows["order"] == order) & ~rows["scheme"].isin(list(NAMED))]
        axes.plot(
            others["gib"], others["tflops_per_gpu"], linestyle="", marker="o", markersize=2.6, color="0.2",
            markerfacecolor="0.2" if filled else "white", markeredgewidth=0.5, label=f"{order}-first",
        )  # fmt: skip
    for scheme, look in looks(NAMED).items():
        for order, filled in (("depth", False), ("breadth", True)):
            found = rows[(rows["scheme"] == scheme) & (rows["order"] == order)]
            axes.plot(
                found["gib"], found["tflops_per_gpu"], linestyle="", markersize=6.5,
                color=look.color, marker=look.marker, markerfacecolor=look.color if filled else "white",
                label=NAMED[scheme] if filled else None, zorder=3,
            )  # fmt: skip
    log_ticks(axes, TICKS, str, "peak memory per GCD, GiB")
