"""Which state may live where: the share of a device's speed that each tier leaves, by tokens of a device."""

import pandas as pd
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import TWO_COLUMNS, canvas, legend_above, log_ticks, shades


def draw(df: pd.DataFrame) -> Figure:
    df = df.assign(where=df["cluster"] + ", " + df["tier"])
    figure = canvas(TWO_COLUMNS, 2.6)
    states = [*df.groupby("state", sort=False)]
    panels = figure.subplots(1, len(states), sharey=True, squeeze=False)[0]
    colours = shades([*df["where"].unique()])
    for axes, (state, rows) in zip(panels, states, strict=True):
        for where, line in rows.groupby("where", sort=False):
            axes.plot(
                line["sequences"], 100 * line["efficiency"], "o-", color=colours[str(where)], label=where
            )
        log_ticks(axes, sorted(rows["sequences"].unique()), "{:,}".format, "sequences of 1,024 tokens")
        axes.set_title(str(state), loc="left")
    panels[0].set_ylabel("predicted efficiency (%)")
    panels[0].set_ylim(0, 104)
    legend_above(figure, panels[0], 6)
    return figure
