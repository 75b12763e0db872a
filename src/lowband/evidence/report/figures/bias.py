"""Predicted over published times by the year of the rows, a mark per source, in the colour of its stack."""

import pandas as pd
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import TWO_COLUMNS, canvas, legend_above, one_line, shades, spread
from lowband.evidence.validation.intervals import MEMORY, RATIOS, TIMES

BAND = 0.05
APART = 0.16  # years between sources of one year


def draw(df: pd.DataFrame) -> Figure:
    df = df[~df["quantity"].isin([MEMORY, *RATIOS])]
    of_amounts = 1 + df["error_percent"] / 100
    df = df.assign(ratio=of_amounts.where(df["quantity"].isin(TIMES), 1 / of_amounts))  # of times
    figure = canvas(TWO_COLUMNS, 2.9)
    axes = figure.subplots()
    one_line(axes, BAND)
    colours = shades(sorted(df["stack"].unique()))
    years = sorted(int(year) for year in df["year"].unique())
    for year in years:
        of_year = df[df["year"] == year]
        sources = list(dict.fromkeys(of_year["source"]))
        for i, source in enumerate(sources):
            rows = of_year[of_year["source"] == source]
            place = year + APART * (i - (len(sources) - 1) / 2)
            ratios, colour = rows["ratio"], colours[rows["stack"].iloc[0]]
            spread(axes, place, ratios, colour)
            axes.annotate(
                source, (place, ratios.quantile(0.95)), (0, 3), textcoords="offset points", rotation=90,
                ha="center", va="bottom", fontsize=6,
            )  # fmt: skip
    for stack, colour in colours.items():
        axes.plot([], [], color=colour, linewidth=3.5, label=stack)
    axes.set_xticks(years, [str(year) for year in years])
    axes.set_ylim(0.55, 1.75)
    axes.set_ylabel("predicted / published time")
    axes.grid(axis="x", visible=False)
    legend_above(figure, axes, columns=4)
    return figure
