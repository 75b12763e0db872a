"""Where a step's time goes: computation, waiting, and the communication hidden by computation."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import (
    TWO_COLUMNS,
    canvas,
    in_order,
    legend_above,
    scheme_ticks,
    shades,
)

PARTS = {
    "compute_time_s": "computing",
    "exposed_comm_time_s": "waiting for communication",
    "hidden_comm_time_s": "communication behind the computation",
}
RANGE = ["step_time_min_s", "step_time_max_s"]


def draw(df: pd.DataFrame) -> Figure:
    schemes = in_order(df["scheme"])
    figure = canvas(TWO_COLUMNS, 0.9 + 0.27 * len(schemes))
    panels = figure.subplots(1, df["ranks"].nunique(), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (ranks, rows) in zip(panels, df.groupby("ranks"), strict=True):
        _bars(axes, rows.set_index("scheme").reindex(schemes))
        repeats = sorted(set(rows["repeats"]))
        n = str(repeats[0]) if len(repeats) == 1 else f"{repeats[0]} to {repeats[-1]}"
        axes.set_title(f"{ranks} ranks, n = {n}", loc="left")
        axes.set_xlabel("seconds of a step")
    scheme_ticks(panels[0], schemes)
    panels[0].set_ylim(len(schemes) - 0.5, -0.5)
    legend_above(figure, panels[0], columns=3)
    return figure


def _bars(axes: Axes, rows: pd.DataFrame) -> None:
    """Two bars per scheme: the parts of the step with its range, below them what went on meanwhile."""
    place = np.arange(len(rows))
    start = np.zeros(len(rows))
    for (column, label), color in zip(PARTS.items(), shades(list(PARTS)).values(), strict=True):
        is_beside = column == "hidden_comm_time_s"
        length = rows[column].to_numpy()
        axes.barh(
            place + (0.27 if is_beside else -0.12), length, left=0 if is_beside else start,
            height=0.2 if is_beside else 0.5, color=color, linewidth=0, label=label,
        )  # fmt: skip
        start = start + (0 if is_beside else length)
    least, most = (rows[column].to_numpy() for column in RANGE)
    axes.hlines(place - 0.12, least, most, color="black", linewidth=0.8)
    axes.grid(axis="y", visible=False)
