"""Where a step's time goes: computation, waiting, and the communication hidden by computation."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import TWO_COLUMNS, canvas, legend_above, shades

SUITE = "box"
PARTS = {
    "compute_time_s": "computing",
    "exposed_comm_time_s": "waiting for communication",
    "hidden_comm_time_s": "communication behind the computation",
}
COLUMNS = ["cluster", "model", "scheme", "ranks", "repeats", "scale", "step_time_s", *PARTS]


def data(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the core experiment's points."""
    return table.loc[table["suite"] == SUITE, COLUMNS]


def draw(df: pd.DataFrame) -> Figure:
    figure = canvas(TWO_COLUMNS, 2.5)
    panels = figure.subplots(1, df["ranks"].nunique(), sharey=True, squeeze=False)[0]
    for axes, (ranks, rows) in zip(panels, df.groupby("ranks"), strict=True):
        _bars(axes, rows)
        repeats = sorted(set(rows["repeats"]))
        n = str(repeats[0]) if len(repeats) == 1 else f"{repeats[0]} to {repeats[-1]}"
        axes.set_title(f"{ranks} ranks, n = {n}", loc="left")
    panels[0].set_ylabel("seconds of a step")
    legend_above(figure, panels[0], columns=3)
    return figure


def _bars(axes: Axes, rows: pd.DataFrame) -> None:
    """Two bars per scheme: the parts of the step, and beside them the communication hidden meanwhile."""
    place = np.arange(len(rows))
    bottom = np.zeros(len(rows))
    for (column, label), (color, hatch) in zip(PARTS.items(), shades(list(PARTS)).values(), strict=True):
        is_beside = column == "hidden_comm_time_s"
        height = rows[column].to_numpy()
        axes.bar(
            place + (0.25 if is_beside else -0.18), height, bottom=0 if is_beside else bottom,
            width=0.28 if is_beside else 0.5, color=color, hatch=hatch, edgecolor="white", linewidth=0,
            label=label,
        )  # fmt: skip
        bottom = bottom + (0 if is_beside else height)
    axes.set_xticks(place, list(rows["scheme"]), rotation=50, ha="right", rotation_mode="anchor")
    axes.grid(axis="x", visible=False)
