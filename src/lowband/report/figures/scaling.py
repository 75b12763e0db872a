"""Throughput (left) and efficiency (right) against ranks, one line per scheme."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from lowband.report.figures.style import (
    TWO_COLUMNS,
    canvas,
    experiments,
    legend_above,
    looks,
    rank_ticks,
)
from lowband.report.points import EXPERIMENT

COLUMNS = ["tokens_per_s", "tokens_per_s_q20", "tokens_per_s_q80", "base_ranks", "efficiency"]


def data(table: pd.DataFrame) -> pd.DataFrame:
    """The measured points."""
    return table.loc[table["tokens_per_s"].notna(), [*EXPERIMENT, "scheme", "ranks", "scaling", *COLUMNS]]


def draw(df: pd.DataFrame) -> Figure:
    panels = experiments(df)
    figure = canvas(TWO_COLUMNS, 0.5 + 2.3 * len(panels))
    grid = figure.subplots(len(panels), 2, squeeze=False)
    for (title, rows), (left, right) in zip(panels, grid, strict=True):
        _throughput(left, rows)
        _efficiency(right, rows)
        left.set_title(title, loc="left")
    legend_above(figure, grid[0, 0], columns=4)
    return figure


def _throughput(axes: Axes, rows: pd.DataFrame) -> None:
    for scheme, look in looks(rows["scheme"]).items():
        line = rows[rows["scheme"] == scheme].sort_values("ranks")
        middle = line["tokens_per_s"].to_numpy()
        spread = np.abs(line[["tokens_per_s_q20", "tokens_per_s_q80"]].to_numpy().T - middle)
        axes.errorbar(
            line["ranks"], middle, spread, fmt=look.marker, linestyle=look.dash, color=look.color,
            markerfacecolor="white", elinewidth=0.7, label=scheme,
        )  # fmt: skip
    axes.set_yscale("log", base=10)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("tokens/s")
    rank_ticks(axes, rows["ranks"])


def _efficiency(axes: Axes, rows: pd.DataFrame) -> None:
    for scheme, look in looks(rows["scheme"]).items():
        line = rows[rows["scheme"] == scheme].sort_values("ranks")
        axes.plot(
            line["ranks"], line["efficiency"], marker=look.marker, linestyle=look.dash, color=look.color,
            markerfacecolor="white",
        )  # fmt: skip
    axes.axhline(1, color="0.3", linestyle=":", linewidth=0.8)
    axes.set_ylim(bottom=0)
    bases = sorted(set(rows["base_ranks"].astype(int)))
    named = "1 rank" if bases == [1] else f"{' or '.join(map(str, bases))} ranks"
    of = "weak-scaling efficiency\n" if (rows["scaling"] == "weak").all() else "efficiency "
    axes.set_ylabel(f"{of}(base: {named})")
    rank_ticks(axes, rows["ranks"])
