"""Throughput relative to another scheme against the outer link's rate; the paper's ratios as lines."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import TWO_COLUMNS, canvas, legend_above, log_ticks

SUITE = "box-sweep"
CONDITION = ["tokens_per_rank", "overlap"]
COLUMNS = ["provenance", "pair", "ranks", *CONDITION, "outer_link_share", "ratio", "links"]
_LOOKS = {
    "zeropp / zero3": ("#0173b2", "o", "-"),
    "hier3 / zero3": ("#d55e00", "s", "--"),
    "hier3 / zeropp": ("#029e73", "^", "-."),
}


def data(table: pd.DataFrame) -> pd.DataFrame:
    """The sweep's points and the reported ratios."""
    return table.loc[(table["suite"] == SUITE) | (table["provenance"] == "reported"), COLUMNS]


def draw(df: pd.DataFrame) -> Figure:
    measured, reported = df[df["provenance"] == "measured"], df[df["provenance"] == "reported"]
    panels = list(measured.groupby(CONDITION, sort=True))
    figure = canvas(TWO_COLUMNS, 3.0)
    axes_row = figure.subplots(1, max(1, len(panels)), sharey=True, squeeze=False)[0]
    for axes, (_, rows) in zip(axes_row, panels, strict=False):
        tokens, overlap = (rows[column].iloc[0] for column in CONDITION)
        draw_pairs(axes, rows, reported, "outer_link_share")
        log_ticks(
            axes, rows["outer_link_share"], lambda share: "1" if share == 1 else f"1/{round(1 / share)}",
            "rate of the outer link\n(share of nominal)",
        )  # fmt: skip
        axes.invert_xaxis()
        axes.set_title(f"{tokens:,.0f} tokens per rank\n{'with' if overlap else 'without'} overlap")
    axes_row[0].set_ylabel("ratio of TFLOPS per GCD")
    legend_above(figure, axes_row[0], columns=3)
    return figure


def draw_pairs(axes: Axes, rows: pd.DataFrame, reported: pd.DataFrame, x: str) -> None:
    """Each pair's measured ratios against column `x`, and its reported ratio as a line."""
    for pair, (color, marker, dash) in _LOOKS.items():
        line = rows[rows["pair"] == pair].sort_values(x)
        axes.plot(
            line[x], line["ratio"], color=color, marker=marker, linestyle=dash, markerfacecolor="white",
            label=f"{pair}, measured",
        )  # fmt: skip
        for value in reported.loc[reported["pair"] == pair, "ratio"]:
            axes.axhline(value, color=color, linestyle=":", linewidth=1, label=f"{pair}, reported {value:g}")
