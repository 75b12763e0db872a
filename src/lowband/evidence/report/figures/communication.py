"""Seconds of each level's links per step, by collective: one panel per level, one stacked bar per scheme."""

import pandas as pd
from matplotlib.figure import Figure

from lowband.evidence.report.figures import style
from lowband.evidence.tables.points import EXPERIMENT, at_most_ranks

COLUMNS = [
    "scheme", "ranks", "level", "collective", "wire", "counted_bytes", "closed_form_bytes", "rates_of",
    "link_bytes_per_s",
]  # fmt: skip
LEAST = 0.01  # of the longest bar: what is shorter in every bar is among the others
OTHERS = "others"


def data(table: pd.DataFrame) -> pd.DataFrame:
    """Rows whose link has a known rate, of each experiment's most ranks."""
    return at_most_ranks(table[table["link_bytes_per_s"].notna()])[[*EXPERIMENT, *COLUMNS]]


def draw(df: pd.DataFrame) -> Figure:
    panels = style.compared(df)
    if not panels:
        return style.nothing_to_draw("communication.csv", "two schemes over links of known rates")
    levels = list(dict.fromkeys(df["level"]))
    rows_of = {title: _with_seconds(rows) for title, rows in panels}
    seen = {name for rows in rows_of.values() for name in rows["collective"]}
    collectives = sorted(seen - {OTHERS}) + [OTHERS] * (OTHERS in seen)
    bars = [rows[style.LABEL].nunique() for _, rows in panels]
    figure = style.canvas(style.TWO_COLUMNS, 0.7 + sum(1.05 + 0.17 * count for count in bars))
    grid = figure.subplots(
        len(panels), len(levels), squeeze=False, sharex="row", sharey="row",
        height_ratios=[count + 1 for count in bars],
    )  # fmt: skip
    for (title, rows), row in zip(rows_of.items(), grid, strict=True):
        labels = list(dict.fromkeys(rows[style.LABEL]))
        factor, unit = style.time_unit(rows.groupby([style.LABEL, "level"])["counted_s"].sum().max())
        for level, axes in zip(levels, row, strict=True):
            here = rows[rows["level"] == level]
            counted = here.pivot_table("counted_s", style.LABEL, "collective", aggfunc="sum")
            counted = counted.reindex(index=labels, columns=collectives).fillna(0)
            closed = here.groupby(style.LABEL)["closed_form_s"].sum().reindex(labels).fillna(0)
            style.stacked_bars(axes, counted / factor, closed / factor, "closed form, total")
            rate = f", {_rate(here['link_bytes_per_s'].iloc[0])}" if len(here) else ""
            axes.set_title(f"\n\n{level} links{rate}", loc="left")  # below two lines, which all three share
        machine, ranks = rows["rates_of"].iloc[0], rows["ranks"].max()
        row[0].set_xlabel(f"{unit} a step at the rates of {machine}, predicted ({ranks} ranks)", loc="left")
        above = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "bottom"}
        shared = row[0].annotate(title, (0, 1), (0, 15), fontsize="medium", annotation_clip=False, **above)
        shared.set_in_layout(False)  # it is wider than its column
    style.legend_above(figure, grid[0, 0], columns=4)
    return figure


def _rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e9:g} GB/s" if bytes_per_s >= 1e9 else f"{bytes_per_s / 1e3:,.0f} kB/s"


def _with_seconds(rows: pd.DataFrame) -> pd.DataFrame:
    """With the seconds of each row; collectives that are short in every bar under one name."""
    rows = rows.assign(
        counted_s=rows["counted_bytes"] / rows["link_bytes_per_s"],
        closed_form_s=rows["closed_form_bytes"] / rows["link_bytes_per_s"],
    )
    bar = rows.groupby([style.LABEL, "level"])["counted_s"].sum().max()
    most = rows.groupby([style.LABEL, "level", "collective"])["counted_s"].sum().groupby("collective").max()
    is_short = rows["collective"].map(most) < LEAST * bar
    return rows.assign(collective=rows["collective"].mask(is_short, OTHERS))
