"""Throughput of the schemes in depth-first and breadth-first order against passes per optimizer step."""

import pandas as pd
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import ONE_COLUMN, End, by_scheme, canvas, label_ends, log_ticks

RATE = "model_flop_per_s_per_rank_at_scale"


def draw(df: pd.DataFrame) -> Figure:
    figure = canvas(ONE_COLUMN, 2.7)
    axes = figure.subplots()
    ends = []
    for scheme, look, points in by_scheme(df, "accumulation"):
        for order, rows in points.groupby("order"):
            is_breadth = order == "breadth"
            fill = look.color if is_breadth else "white"
            line = {**look.line, "linestyle": "-" if is_breadth else ":", "markerfacecolor": fill}
            axes.plot(rows["accumulation"], rows[RATE] / 1e12, **line)
            last = rows.iloc[-1]
            ends.append(End(f"{scheme}, {order}", last["accumulation"], last[RATE] / 1e12, look.color))
    log_ticks(axes, df["accumulation"], "{:g}".format, "backward passes per optimizer step")
    axes.set_ylim(0, 1.08 * df[RATE].max() / 1e12)
    axes.set_ylabel("TFLOPS per GCD, at scale")
    label_ends(axes, ends, 2.1)
    return figure
