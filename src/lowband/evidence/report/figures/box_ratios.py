"""Throughput relative to another scheme in the scale model; the paper's ratios as dotted lines."""

from collections.abc import Callable
from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import ONE_COLUMN, TWO_COLUMNS, canvas, legend_above, log_ticks

CONDITION = ("tokens_per_rank", "overlap")  # of a panel, where there are several
_LOOKS = {
    "zeropp / zero3": ("#0173b2", "o", "-"),
    "hier3 / zero3": ("#d55e00", "s", "--"),
    "hier3 / zeropp": ("#029e73", "^", "-."),
}


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
    is_falling: bool = False
    least: float | None = None

    def data(self, table: pd.DataFrame) -> pd.DataFrame:
        """The suite's points and, if there are any, the reported ratios."""
        measured = table["suite"] == self.suite
        kept = measured | (table["provenance"] == "reported") if measured.any() else measured
        return table.loc[kept, ["provenance", "pair", "ranks", *self.columns, "ratio", "links"]]

    def draw(self, df: pd.DataFrame) -> Figure:
        measured, reported = df[df["provenance"] == "measured"], df[df["provenance"] == "reported"]
        panels = [rows for _, rows in measured.groupby(list(CONDITION))] if self.has_panels else [measured]
        figure = canvas(TWO_COLUMNS, 3.0) if self.has_panels else canvas(ONE_COLUMN, 3.9)
        axes_row = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        for axes, rows in zip(axes_row, panels, strict=True):
            _draw_pairs(axes, rows, reported, self.x)
            log_ticks(axes, rows[self.x], self.tick, self.label)
            if self.is_falling:
                axes.invert_xaxis()
            if self.has_panels:
                tokens, overlap = (rows[column].iloc[0] for column in CONDITION)
                axes.set_title(f"{tokens:,.0f} tokens per rank\n{'with' if overlap else 'without'} overlap")
        axes_row[0].set_ylim(bottom=self.least)
        axes_row[0].set_ylabel("ratio of TFLOPS per GCD")
        legend_above(figure, axes_row[0], columns=3 if self.has_panels else 1)
        return figure


SWEEP = Pairs(
    "box-sweep", ("tokens_per_rank", "overlap", "outer_link_share"), "outer_link_share",
    "rate of the outer link\n(share of nominal)",
    lambda share: "1" if share == 1 else f"1/{round(1 / share)}", has_panels=True, is_falling=True,
)  # fmt: skip
ACCUMULATION = Pairs(
    "box-accumulation", ("tokens_per_rank", "accumulation", "overlap", "outer_link_share"), "accumulation",
    "backward passes per optimizer step",
)  # fmt: skip
ATTAINED = Pairs(
    "box-attained", ("tokens_per_rank", "accumulation", "overlap"), "ranks", "ranks", least=1
)  # fmt: skip


def _draw_pairs(axes: Axes, rows: pd.DataFrame, reported: pd.DataFrame, x: str) -> None:
    """Each pair's measured ratios against column `x`, and its reported ratio as a line."""
    for pair, (color, marker, dash) in _LOOKS.items():
        line = rows[rows["pair"] == pair].sort_values(x)
        axes.plot(
            line[x], line["ratio"], color=color, marker=marker, linestyle=dash, markerfacecolor="white",
            label=f"{pair}, measured",
        )  # fmt: skip
        for value in reported.loc[reported["pair"] == pair, "ratio"]:
            axes.axhline(value, color=color, linestyle=":", linewidth=1, label=f"{pair}, reported {value:g}")
