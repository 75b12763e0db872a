"""Throughput relative to another scheme in the scale model; the paper's ratios as dotted lines."""

from collections.abc import Callable
from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import (
    HERO,
    ONE_COLUMN,
    TWO_COLUMNS,
    End,
    canvas,
    label_ends,
    log_ticks,
)

RATIO = ["ratio", "ratio_low", "ratio_high"]
CONDITION = ("tokens_per_rank", "overlap")  # of a panel, where there are several
_COLORS = {"zeropp / zero3": "#0173b2", "hier3 / zero3": "0.35", "hier3 / zeropp": HERO}
_MARKERS = dict(zip(_COLORS, "DsoP", strict=False))


class Pairs(NamedTuple):
    """A figure of a suite's ratios against column `x`, with one panel or one for each CONDITION.

    columns: conditions in the figure's CSV; least: where the y axis starts
    """

    suite: str
    columns: tuple[str, ...]
    x: str
    label: str
    tick: Callable[[float], str] = "{:g}".format
    has_panels: bool = False
    least: float | None = None

    def data(self, table: pd.DataFrame) -> pd.DataFrame:
        """The suite's points and, if there are any, the reported ratios."""
        drawn = table["pair"].isin(_COLORS)
        measured = (table["suite"] == self.suite) & drawn
        kept = measured | (table["provenance"] == "reported") if measured.any() else measured
        columns = ["provenance", "pair", "ranks", *self.columns, *RATIO, "repeats", "links"]
        return table.loc[kept, columns]

    def draw(self, df: pd.DataFrame) -> Figure:
        measured, reported = df[df["provenance"] == "measured"], df[df["provenance"] == "reported"]
        panels = [rows for _, rows in measured.groupby(list(CONDITION))] if self.has_panels else [measured]
        figure = canvas(TWO_COLUMNS, 2.8) if self.has_panels else canvas(ONE_COLUMN, 2.7)
        axes_row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, rows in zip(axes_row, panels, strict=True):
            ends = _draw_pairs(axes, rows, reported, self.x)
            log_ticks(axes, rows[self.x], self.tick, self.label)
            if self.has_panels:
                tokens, overlap = (rows[column].iloc[0] for column in CONDITION)
                axes.set_title(f"{tokens:,.0f} tokens a rank,\n{'with' if overlap else 'no'} overlap")
        axes_row[0].set_ylim(bottom=self.least)
        axes_row[0].set_ylabel("ratio of TFLOPS per GCD")
        label_ends(axes_row[-1], ends, 1.9)
        return figure


SWEEP = Pairs(
    "box-sweep", ("tokens_per_rank", "overlap", "outer_link_share"), "outer_link_share",
    "rate of the link\nbetween nodes",
    lambda share: "1" if share == 1 else f"1/{round(1 / share)}", has_panels=True,
)  # fmt: skip
ACCUMULATION = Pairs(
    "box-accumulation", ("tokens_per_rank", "accumulation", "overlap", "outer_link_share"), "accumulation",
    "backward passes per optimizer step",
)  # fmt: skip
ATTAINED = Pairs(
    "box-attained", ("tokens_per_rank", "accumulation", "overlap"), "ranks", "ranks", least=1
)  # fmt: skip


def _draw_pairs(axes: Axes, rows: pd.DataFrame, reported: pd.DataFrame, x: str) -> list[End]:
    """Each pair's measured ratios against column `x`, and its reported ratio as a line; where they end."""
    ends = []
    for pair, color in _COLORS.items():
        line = rows[rows["pair"] == pair].sort_values(x)
        if line.empty:
            continue
        ratio, low, high = (line[column].to_numpy() for column in RATIO)
        axes.errorbar(
            line[x], ratio, [ratio - low, high - ratio], color=color, marker=_MARKERS[pair],
            markerfacecolor="white", elinewidth=0.8, linewidth=2.2 if color == HERO else 1.1,
        )  # fmt: skip
        ends.append(End(pair, line[x].iloc[-1], ratio[-1], color))
        for value in reported.loc[reported["pair"] == pair, "ratio"]:
            axes.axhline(value, color=color, linestyle=":", linewidth=1)
            ends.append(End(f"reported {value:.4g}", line[x].iloc[-1], value, color))
    return ends
