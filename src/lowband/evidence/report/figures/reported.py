"""Ours beside what a paper reports: a row per graded claim, a panel per unit."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lowband.evidence.report.figures.style import TWO_COLUMNS, canvas, legend_above

MEASURED, PREDICTED = "#0b6e4f", "#7a4ea3"  # as on the page
ROW = 0.19  # inches
COLUMNS = ["id", "short", "unit", "verdict", "reported", "ours", "provenance"]


def data(table: pd.DataFrame) -> pd.DataFrame:
    """The claims that were tried and have a reported number other than 0, by unit."""
    rows = table[table["reported"].abs().gt(0) & table["ours"].notna()].fillna({"unit": ""})
    units = list(dict.fromkeys(rows["unit"]))
    return rows.sort_values("unit", key=lambda unit: unit.map(units.index), kind="stable")[COLUMNS]


def draw(df: pd.DataFrame) -> Figure:
    panels = list(df.groupby("unit", sort=False))
    heights = [len(rows) + 2.6 for _, rows in panels]  # of the rows, and of an axis
    figure = canvas(TWO_COLUMNS, 0.35 + ROW * sum(heights))
    column = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (unit, rows) in zip(column, panels, strict=True):
        _panel(axes, str(unit), rows)
    legend_above(figure, column, columns=4)
    return figure


def _panel(axes: Axes, unit: str, rows: pd.DataFrame) -> None:
    places = range(len(rows))
    axes.hlines(places, rows["reported"], rows["ours"], color="0.75", linewidth=0.8)
    axes.plot(
        rows["reported"], places, "o", markerfacecolor="white", markeredgecolor="black", label="reported"
    )
    for place, (_, row) in zip(places, rows.iterrows(), strict=True):
        color = MEASURED if row["provenance"] == "measured" else PREDICTED
        axes.plot(row["ours"], place, "o", color=color, markersize=3, label=row["provenance"])
    axes.set_yticks(places, [f"{row['short']}: {row['verdict']}" for _, row in rows.iterrows()])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.08)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel(unit)
