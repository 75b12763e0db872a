"""Strong scaling of models cut along three axes: TFLOPS per GCD over those on the fewest, by schedule."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import TWO_COLUMNS, canvas, log_ticks, shades


def draw(df: pd.DataFrame) -> Figure:
    figure = canvas(TWO_COLUMNS, 2.6)
    models = [*df.groupby("model", sort=False)]
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    colours = shades([*df["schedule"].unique()])
    for axes, (model, rows) in zip(panels, models, strict=True):
        _lines(axes, rows, colours)
        axes.set_title(f"{model}, {rows['global_batch'].iloc[0]:,} sequences a step", loc="left")
    panels[0].set_ylabel("predicted efficiency (%)")
    panels[0].set_ylim(0, 104)
    panels[0].legend()
    return figure


def _lines(axes: Axes, rows: pd.DataFrame, colours: dict[str, str]) -> None:
    reported = rows["reported_efficiency"].iloc[0]
    for schedule, line in rows.groupby("schedule", sort=False):
        axes.plot(line["ranks"], line["efficiency"], "o-", color=colours[str(schedule)], label=schedule)
    axes.axhline(reported, color="0.4", linewidth=0.8, linestyle=":", label="reported, on the most")
    log_ticks(axes, sorted(rows["ranks"].unique()), "{:,}".format, "GCDs")
