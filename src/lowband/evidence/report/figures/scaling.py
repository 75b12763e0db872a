"""Throughput (left) and efficiency (right) against ranks, one line per scheme."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from lowband.evidence.report.figures import style
from lowband.evidence.tables.points import EXPERIMENT

COLUMNS = ["tokens_per_s", "tokens_per_s_q20", "tokens_per_s_q80", "base_ranks", "efficiency"]


def data(table: pd.DataFrame) -> pd.DataFrame:
    """The measured points."""
    return table.loc[table["tokens_per_s"].notna(), [*EXPERIMENT, "scheme", "ranks", "scaling", *COLUMNS]]


def draw(df: pd.DataFrame) -> Figure:
    panels = style.experiments(df)
    figure = style.canvas(style.TWO_COLUMNS, 0.5 + 2.3 * len(panels))
    grid = figure.subplots(len(panels), 2, squeeze=False)
    for (title, rows), (left, right) in zip(panels, grid, strict=True):
        for scheme, look, line in style.by_scheme(rows, "ranks"):
            middle = line["tokens_per_s"].to_numpy()
            spread = np.abs(line[["tokens_per_s_q20", "tokens_per_s_q80"]].to_numpy().T - middle)
            left.errorbar(line["ranks"], middle, spread, **look.line, elinewidth=0.7, label=scheme)
            right.plot(line["ranks"], line["efficiency"], **look.line)
        _throughput_axis(left)
        style.one_line(right)
        right.set_ylim(bottom=0)
        right.set_ylabel(_efficiency_label(rows))
        for axes in (left, right):
            style.rank_ticks(axes, rows["ranks"])
        left.set_title(title, loc="left")
    style.legend_above(figure, grid[0, 0], columns=4)
    return figure


def _throughput_axis(axes: Axes) -> None:
    axes.set_yscale("log", base=10)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("tokens/s")


def _efficiency_label(rows: pd.DataFrame) -> str:
    bases = sorted(set(rows["base_ranks"].astype(int)))
    named = "1 rank" if bases == [1] else f"{' or '.join(map(str, bases))} ranks"
    of = "weak-scaling efficiency\n" if (rows["scaling"] == "weak").all() else "efficiency "
    return f"{of}(base: {named})"
