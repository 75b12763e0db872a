"""Throughput relative to another scheme at the rates that the paper's stack reached; its ratios as lines."""

import pandas as pd
from matplotlib.figure import Figure

from lowband.evidence.report.figures.box_ratios import draw_pairs
from lowband.evidence.report.figures.style import ONE_COLUMN, canvas, legend_above, rank_ticks

SUITE = "box-attained"
COLUMNS = ["provenance", "pair", "ranks", "tokens_per_rank", "accumulation", "overlap", "ratio", "links"]


def data(table: pd.DataFrame) -> pd.DataFrame:
    """The suite's points and, if there are any, the reported ratios."""
    measured = table["suite"] == SUITE
    kept = measured | (table["provenance"] == "reported") if measured.any() else measured
    return table.loc[kept, COLUMNS]


def draw(df: pd.DataFrame) -> Figure:
    measured, reported = df[df["provenance"] == "measured"], df[df["provenance"] == "reported"]
    figure = canvas(ONE_COLUMN, 3.9)
    axes = figure.subplots()
    draw_pairs(axes, measured, reported, "ranks")
    rank_ticks(axes, measured["ranks"])
    axes.set_ylim(bottom=1)
    axes.set_ylabel("ratio of TFLOPS per GCD")
    legend_above(figure, axes, columns=1)
    return figure
