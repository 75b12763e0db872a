"""Loss against time, a panel for each rate of the link between nodes."""

import pandas as pd
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import TWO_COLUMNS, band, by_scheme, canvas, legend_above, note
from lowband.evidence.tables.derived.convergence_curves import WINDOW


def draw(df: pd.DataFrame) -> Figure:
    figure = canvas(TWO_COLUMNS, 4.2)
    panels = figure.subplots(2, 2, sharey=True)
    rates = sorted(df["outer_link_bits_per_s"].unique(), reverse=True)
    for axes, rate in zip(panels.flat, rates, strict=False):
        rows = df[df["outer_link_bits_per_s"] == rate]
        for place, (scheme, look, line) in enumerate(by_scheme(rows, "step")):
            band(axes, line, "time_s", "loss_low", "loss_high", look.color)
            is_measured = (line["provenance"] == "measured").all()
            style = {**look.line, "linestyle": "-" if is_measured else ":"}
            every = (3 * place, 24)
            axes.plot(line["time_s"], line["loss"], **style, label=scheme, markevery=every, markersize=3.5)
        axes.set_xscale("log")
        note(axes, _named(rate))
    for axes in panels[1]:
        axes.set_xlabel("time in the scale model (s)")
    for axes in panels[:, 0]:
        axes.set_ylabel(f"loss (nats/token),\nmean over {WINDOW} steps")
    legend_above(figure, panels[0, 0], columns=5)
    return figure


def _named(bits_per_s: float) -> str:
    return f"{bits_per_s / 1e9:g} Gbit/s" if bits_per_s >= 1e9 else f"{bits_per_s / 1e6:g} Mbit/s"
