"""Loss of exact and quantized schemes over seeds (top) and its difference from the reference's (bottom)."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowband.report.figures.style import ONE_COLUMN, canvas, legend_above, looks
from lowband.report.points import EXPERIMENT
from lowband.report.tables.convergence import REFERENCE
from lowband.report.tables.convergence_curves import WINDOW


def data(table: pd.DataFrame) -> pd.DataFrame:
    return table[[*EXPERIMENT, "scheme", "step", "seeds", *_columns("loss"), *_columns("difference")]]


def _columns(name: str) -> list[str]:
    return [name, f"{name}_low", f"{name}_high"]


def draw(df: pd.DataFrame) -> Figure:
    figure = canvas(ONE_COLUMN, 4.2)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    for axes, name in ((top, "loss"), (bottom, "difference")):
        _lines(axes, df, name)
    top.set_ylabel("loss (nats/token)")
    bottom.set_ylabel(f"loss less that of {REFERENCE}\n(nats/token)")
    bottom.set_xlabel("optimizer step")
    seeds = int(df["seeds"].min())
    top.annotate(
        f"{seeds} seeds, mean over {WINDOW} steps",
        (0.97, 0.93),
        xycoords="axes fraction",
        ha="right",
        va="top",
    )
    legend_above(figure, top, columns=2)
    return figure


def _lines(axes: Axes, df: pd.DataFrame, name: str) -> None:
    for place, (scheme, look) in enumerate(looks(df["scheme"]).items()):
        line = df[df["scheme"] == scheme]
        axes.fill_between(
            line["step"], line[f"{name}_low"], line[f"{name}_high"], color=look.color, alpha=0.15, linewidth=0
        )
        axes.plot(
            line["step"], line[name], color=look.color, linestyle=look.dash, marker=look.marker, label=scheme,
            markevery=(8 * place, 60), markersize=3.5, markerfacecolor="white",
        )  # fmt: skip
