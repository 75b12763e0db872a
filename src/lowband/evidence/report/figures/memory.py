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
    panels = style.compared(df)
    if not panels:
        return style.nothing_to_draw("memory.csv", "two schemes")
    # The states that the closed form covers come first, so that its marker lies on their edge.
    states = list(dict.fromkeys(df.sort_values("closed_form_bytes", key=pd.isna, kind="stable")["state"]))
    bars = [rows[style.LABEL].nunique() for _, rows in panels]
    figure = style.canvas(style.ONE_COLUMN, 0.9 + sum(0.88 + 0.17 * count for count in bars))
    column = figure.subplots(len(panels), 1, squeeze=False, height_ratios=[count + 1 for count in bars])[:, 0]
    for (title, rows), axes in zip(panels, column, strict=True):
        labels = list(dict.fromkeys(rows[style.LABEL]))
        measured = rows.pivot_table("held_bytes", style.LABEL, "state", aggfunc="max")
        measured = measured.reindex(index=labels, columns=states).fillna(0)
        closed = rows.groupby(style.LABEL)["closed_form_bytes"].sum().reindex(labels)
        unit, name = style.byte_unit(measured.sum(axis=1).max())
        style.stacked_bars(axes, measured / unit, closed / unit, "closed form")
        axes.set_xlabel(f"{name} per rank ({rows['ranks'].max()} ranks)")
        axes.set_title(title.replace(", sequence", ",\nsequence"), loc="left")  # a column is narrow
    style.legend_above(figure, column[0], columns=3)
    return figure
