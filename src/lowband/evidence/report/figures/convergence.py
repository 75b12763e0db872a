"""Loss of exact and quantized schemes over seeds (top) and its difference from the reference's (bottom)."""

import pandas as pd
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import ONE_COLUMN, band, by_scheme, canvas, legend_above, note
from lowband.evidence.tables.derived.convergence import REFERENCE
from lowband.evidence.tables.derived.convergence_curves import WINDOW
from lowband.evidence.tables.points import EXPERIMENT


def data(table: pd.DataFrame) -> pd.DataFrame:
    return table[[*EXPERIMENT, "scheme", "step", "seeds", *_columns("loss"), *_columns("difference")]]


def _columns(name: str) -> list[str]:
    return [name, f"{name}_low", f"{name}_high"]


def draw(df: pd.DataFrame) -> Figure:
    figure = canvas(ONE_COLUMN, 4.2)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for axes, name in ((top, "loss"), (bottom, "difference")):
        for place, (scheme, look, line) in enumerate(by_scheme(df, "step")):
            band(axes, line, "step", f"{name}_low", f"{name}_high", look.color)
            every = (8 * place, 60)
            axes.plot(line["step"], line[name], **look.line, label=scheme, markevery=every, markersize=3.5)
    top.set_ylabel("loss (nats/token)")
    bottom.set_ylabel(f"loss less that of {REFERENCE}\n(nats/token)")
    bottom.set_xlabel("optimizer step")
    note(top, f"{int(df['seeds'].min())} seeds, mean over {WINDOW} steps")
    legend_above(figure, top, columns=2)
    return figure
