"""Bytes held by the fullest rank: one stacked bar per scheme, one part per state."""

import pandas as pd
from matplotlib.figure import Figure

from lowband.evidence.report.figures import style
from lowband.evidence.tables.points import EXPERIMENT, at_most_ranks


def data(table: pd.DataFrame) -> pd.DataFrame:
    """Without `start`: what is held before the first step is gone when the others peak."""
    rows = at_most_ranks(table[table["state"] != "start"])
    return rows[[*EXPERIMENT, "scheme", "ranks", "state", "held_bytes", "closed_form_bytes"]]


def draw(df: pd.DataFrame) -> Figure:
    panels = style.experiments(df)
    # The states that the closed form covers go to the bottom, so that its marker lies on their upper edge.
    states = list(dict.fromkeys(df.sort_values("closed_form_bytes", key=pd.isna, kind="stable")["state"]))
    figure = style.canvas(style.ONE_COLUMN, 1.0 + 2.2 * len(panels))
    column = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for (title, rows), axes in zip(panels, column, strict=True):
        schemes = list(dict.fromkeys(rows["scheme"]))
        measured = rows.pivot_table("held_bytes", "scheme", "state", aggfunc="max")
        measured = measured.reindex(index=schemes, columns=states).fillna(0)
        closed = rows.groupby("scheme")["closed_form_bytes"].sum().reindex(schemes)
        unit, name = style.byte_unit(measured.sum(axis=1).max())
        style.stacked_bars(axes, measured / unit, closed / unit, "closed form")
        axes.set_ylabel(f"{name} per rank ({rows['ranks'].max()} ranks)")
        axes.set_title(title, loc="left")
    style.legend_above(figure, column[0], columns=3)
    return figure
