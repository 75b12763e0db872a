"""Throughput relative to another scheme against backward passes per step; the paper's ratios as lines."""

import pandas as pd
from matplotlib.figure import Figure

from lowband.evidence.report.figures.box_ratios import draw_pairs
from lowband.evidence.report.figures.style import ONE_COLUMN, canvas, legend_above, log_ticks

SUITE = "box-accumulation"
COLUMNS = [
    "provenance", "pair", "ranks", "tokens_per_rank", "accumulation", "overlap", "outer_link_share", "ratio",
    "links",
]  # fmt: skip


def data(table: pd.DataFrame) -> pd.DataFrame:
    """The suite's points and the reported ratios."""
    return table.loc[(table["suite"] == SUITE) | (table["provenance"] == "reported"), COLUMNS]


def draw(df: pd.DataFrame) -> Figure:
    measured, reported = df[df["provenance"] == "measured"], df[df["provenance"] == "reported"]
    figure = canvas(ONE_COLUMN, 3.9)
    axes = figure.subplots()
    draw_pairs(axes, measured, reported, "accumulation")
    log_ticks(axes, measured["accumulation"], "{:g}".format, "backward passes per optimizer step")
    axes.set_ylabel("ratio of TFLOPS per GCD")
    legend_above(figure, axes, columns=1)
    return figure
