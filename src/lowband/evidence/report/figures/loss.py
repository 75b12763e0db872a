"""Loss of every run (top) and its difference from the reference run's (bottom)."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lowband.evidence.report.figures.style import (
    ONE_COLUMN,
    canvas,
    experiments,
    legend_above,
    looks,
    note,
    nothing_to_draw,
)
from lowband.evidence.tables.points import EXPERIMENT

KEYS = [*EXPERIMENT, "global_batch", "repeat", "run_id", "scheme", "ranks", "step"]
MOST_TICKS = 6  # most decades that are labelled
ROOM = 1e5  # factor above the data, to make room for the note
REFERENCE = ["reference_run", "reference_scheme", "reference_ranks"]


def data(table: pd.DataFrame) -> pd.DataFrame:
    return table[[*KEYS, "loss", *REFERENCE, "loss_difference"]]


def draw(df: pd.DataFrame) -> Figure:
    panels = [panel for panel in experiments(df) if len(set(panel[1]["run_id"])) > 1]
    if not panels:
        return nothing_to_draw("loss.csv", "two runs")
    figure = canvas(ONE_COLUMN, 0.6 + 3.4 * len(panels))
    column = figure.subplots(2 * len(panels), 1, squeeze=False)[:, 0]
    for i, (title, rows) in enumerate(panels):
        _curves(column[2 * i], rows)
        _differences(column[2 * i + 1], rows)
        column[2 * i].set_title(title, loc="left")
    for axes in column:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    legend_above(figure, column[0], columns=3)
    return figure


def _curves(axes: Axes, rows: pd.DataFrame) -> None:
    for scheme, line in _lines(rows).items():
        for i, (_, run) in enumerate(rows[rows["scheme"] == scheme].groupby("run_id", sort=False)):
            axes.plot(run["step"], run["loss"], **line, label=scheme if i == 0 else None)
    axes.margins(y=0.12)
    axes.set_ylabel("loss (nats/token)")
    note(axes, f"{rows['run_id'].nunique()} runs")


def _differences(axes: Axes, rows: pd.DataFrame) -> None:
    """Plot, per scheme, the largest difference over its runs. The axis is linear from 0 to the smallest
    difference, then logarithmic, so that exact zeros are on it."""
    others = rows[rows["run_id"] != rows["reference_run"]]
    worst = others.groupby(["scheme", "step"], sort=False)["loss_difference"].max().reset_index()
    for scheme, line in _lines(rows).items():
        of_scheme = worst[worst["scheme"] == scheme]
        if not of_scheme.empty:  # an empty unclipped line breaks the layout
            axes.plot(of_scheme["step"], of_scheme["loss_difference"], **line, clip_on=False)
    positive = worst.loc[worst["loss_difference"] > 0, "loss_difference"]
    if not positive.empty:
        smallest = 10 ** np.floor(np.log10(positive.min()))
        axes.set_yscale("symlog", linthresh=smallest, linscale=1)
        axes.set_ylim(0, ROOM * positive.max())
        decades = np.arange(np.log10(smallest), np.log10(ROOM * positive.max()))
        every = 1 + len(decades) // MOST_TICKS
        axes.set_yticks([0, *10 ** decades[every - 1 :: every]])
    equal = int((others.groupby("run_id")["loss_difference"].max() == 0).sum())
    scheme, ranks = rows["reference_scheme"].iloc[0], int(rows["reference_ranks"].iloc[0])
    reference = f"reference: {scheme}, {ranks} rank{'s' if ranks > 1 else ''}"
    note(axes, f"{reference}\nexactly 0 at every step: {equal} of {others['run_id'].nunique()} runs")
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("|loss - reference|")


def _lines(rows: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Scheme -> its line's style: markers shrink from each to the next, so that coinciding curves show."""
    schemes = looks(rows["scheme"])
    every = max(1, rows["step"].max() // 20)
    return {
        scheme: {
            **look.line, "markevery": every, "markersize": 2 + 0.85 * (len(schemes) - 1 - i),
            "markerfacecolor": "none", "markeredgecolor": look.color, "markeredgewidth": 0.6,
            "linewidth": 0.8,
        }
        for i, (scheme, look) in enumerate(schemes.items())
    }  # fmt: skip
