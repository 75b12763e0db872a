"""Bytes per rank and step over each level's links: one panel per level, one stacked bar per scheme."""

import pandas as pd
from matplotlib.figure import Figure

from lowband.evidence.report.figures import style
from lowband.evidence.tables.points import EXPERIMENT, at_most_ranks


def data(table: pd.DataFrame) -> pd.DataFrame:
    columns = ["scheme", "ranks", "level", "collective", "wire", "counted_bytes", "closed_form_bytes"]
    return at_most_ranks(table)[[*EXPERIMENT, *columns]]


def draw(df: pd.DataFrame) -> Figure:
    panels = style.experiments(df)
    levels = list(dict.fromkeys(df["level"]))
    collectives = sorted(df["collective"].unique())
    figure = style.canvas(style.TWO_COLUMNS, 0.7 + 2.2 * len(panels))
    grid = figure.subplots(len(panels), len(levels), squeeze=False, sharey="row")
    for (title, rows), row in zip(panels, grid, strict=True):
        schemes = list(dict.fromkeys(rows["scheme"]))
        unit, name = style.byte_unit(rows.groupby(["level", "scheme"])["counted_bytes"].sum().max())
        for level, axes in zip(levels, row, strict=True):
            here = rows[rows["level"] == level]
            counted = here.pivot_table("counted_bytes", "scheme", "collective", aggfunc="sum")
            counted = counted.reindex(index=schemes, columns=collectives).fillna(0)
            closed = here.groupby("scheme")["closed_form_bytes"].sum().reindex(schemes).fillna(0)
            style.stacked_bars(axes, counted / unit, closed / unit, "closed form, total")
            axes.set_title(f"over {level} links")
        row[0].set_ylabel(f"{name} sent per rank and step\n({rows['ranks'].max()} ranks)")
        row[0].set_title(f"{title}\n" if title else "", loc="left")  # above the level's name
    style.legend_above(figure, grid[0, 0], columns=4)
    return figure
