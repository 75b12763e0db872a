"""The style of every figure: sizes, lettering, and one colour, marker and dash per scheme."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import matplotlib as mpl
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from lowband.evidence.tables.points import EXPERIMENT, NO_CONDITION

# Inches: one and two columns of an IEEE page (IEEE Author Center).
ONE_COLUMN, TWO_COLUMNS = 3.5, 7.16
POINTS = 8  # font size in print


@contextmanager
def paper_style() -> Iterator[None]:
    """matplotlib's settings for a printed paper; fonts are embedded as TrueType."""
    settings = {
        **sns.plotting_context("paper"),
        **sns.axes_style("ticks"),
        "font.family": "DejaVu Sans",
        **dict.fromkeys(("font.size", "axes.titlesize", "axes.labelsize"), POINTS),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), POINTS),
        "legend.frameon": False,
        "axes.grid": True,
        "grid.linewidth": 0.4,
        "grid.color": "0.88",
        "axes.axisbelow": True,
        **dict.fromkeys(("axes.linewidth", "xtick.major.width", "ytick.major.width"), 0.6),
        "lines.linewidth": 1.1,
        "lines.markersize": 4.5,
        "hatch.linewidth": 0.4,
        **dict.fromkeys(("pdf.fonttype", "ps.fonttype"), 42),
        "svg.fonttype": "path",  # letters as paths: they look the same on every page
        "svg.hashsalt": "lowband",  # ids inside an SVG stay the same when it is redrawn
    }
    with mpl.rc_context(settings):
        yield


Dash = str | tuple[float, tuple[float, ...]]


class Look(NamedTuple):
    """A scheme's colour, marker and dash; the last two distinguish it in grey."""

    color: str
    marker: str
    dash: Dash

    @property
    def line(self) -> dict[str, Any]:
        """The look as arguments of `Axes.plot`, for markers filled white."""
        return {
            "color": self.color, "marker": self.marker, "linestyle": self.dash, "markerfacecolor": "white",
        }  # fmt: skip


_COLORS = sns.color_palette("colorblind", 10).as_hex()
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
_DASHES: tuple[Dash, ...] = (
    "-", (0, (4, 1.2)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (3, 1)), (0, (6, 2)), (0, (2, 1)),
    (0, (4, 1, 1, 1, 1, 1)), (0, (1, 2)), (0, (5, 3)),
)  # fmt: skip

# A scheme's position here fixes its look in every figure. Schemes that are not listed follow by name.
_PLACES = ("ddp", "zero1", "zero2", "zero3", "hpz", "hsdp", "hier3-exact", "hier3", "mics", "zeropp")


def looks(schemes: Iterable[str]) -> dict[str, Look]:
    """Scheme -> look, in the order given."""
    names = list(dict.fromkeys(schemes))
    place = {name: i for i, name in enumerate([*_PLACES, *sorted(set(names) - set(_PLACES))])}
    return {name: _look(place[name]) for name in names}


def _look(i: int) -> Look:
    # Beyond ten, markers are shifted against colours, so that no pair repeats.
    return Look(_COLORS[i % 10], _MARKERS[(i + i // 10) % 10], _DASHES[i % 10])


def shades(names: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Fill and hatch for the parts of stacked bars; the hatch distinguishes them in grey."""
    hatches = ("", "////", "....", "\\\\\\\\", "xxxx", "----", "++++", "oooo")
    colors = sns.color_palette("colorblind", len(names), desat=0.75).as_hex()
    return {name: (colors[i], hatches[i % len(hatches)]) for i, name in enumerate(names)}


def canvas(width: float, height: float) -> Figure:
    """An empty figure with automatic layout that needs no window system. Sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def nothing_to_draw(table: str) -> Figure:
    """A placeholder figure: a suite may measure nothing for it, or every run may have failed."""
    figure = canvas(ONE_COLUMN, 1)
    figure.text(0.5, 0.5, f"{table} has no row to draw", ha="center", va="center")
    return figure


def experiments(df: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(title, rows) of each experiment; each gets its own panels. A lone measured one needs no title."""
    groups = df.groupby(EXPERIMENT, sort=False)
    lone = len(groups) == 1 and (df["provenance"] == "measured").all()
    return [("" if lone else _title(rows.iloc[0]), rows) for _, rows in groups]


def _title(row: "pd.Series[Any]") -> str:
    where = f"{row['suite']} ({row['provenance']} on {row['cluster']})"
    what = f"{row['engine']}, {row['model']}, sequence {row['seq_len']}, {row['compute_dtype']}"
    return "\n".join([where, what, *([] if row["condition"] == NO_CONDITION else [row["condition"]])])


def by_scheme(rows: pd.DataFrame, x: str) -> Iterator[tuple[str, Look, pd.DataFrame]]:
    """Each scheme with its look and its rows in the order of column `x`."""
    for scheme, look in looks(rows["scheme"]).items():
        yield scheme, look, rows[rows["scheme"] == scheme].sort_values(x, kind="stable")


def band(axes: Axes, rows: pd.DataFrame, x: str, low: str, high: str, color: str) -> None:
    """A pale band between two columns."""
    axes.fill_between(rows[x], rows[low], rows[high], color=color, alpha=0.15, linewidth=0)


def one_line(axes: Axes, within: float = 0) -> None:
    """A dotted line at 1, where two compared values are equal, and a grey band of `within` around it."""
    if within:
        axes.axhspan(1 - within, 1 + within, color="0.9", zorder=0)
    axes.axhline(1, color="0.3", linestyle=":", linewidth=0.8)


def log_ticks(axes: Axes, values: Iterable[float], form: Callable[[Any], str], label: str) -> None:
    """Make the x axis logarithmic, with a labelled tick at each of the values and nothing between them."""
    ticks = sorted(set(values))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [form(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(label)


def rank_ticks(axes: Axes, ranks: Iterable[int]) -> None:
    log_ticks(axes, ranks, str, "ranks")


def byte_unit(largest: float) -> tuple[int, str]:
    """(bytes, name) of the unit for an axis that goes up to `largest` bytes."""
    return (2**30, "GiB") if largest >= 2**30 else (2**20, "MiB")


def stacked_bars(axes: Axes, parts: pd.DataFrame, totals: pd.Series, what: str) -> None:
    """One bar per row of `parts`, stacked from its columns, and a marker at each row's total."""
    bottom = pd.Series(0.0, index=parts.index)
    for part, (color, hatch) in shades(list(parts.columns)).items():
        axes.bar(
            parts.index, parts[part], bottom=bottom, color=color, hatch=hatch, edgecolor="white",
            linewidth=0, width=0.7, label=part.replace("_", " "),
        )  # fmt: skip
        bottom = bottom + parts[part]
    axes.plot(
        totals.index, totals, linestyle="", marker="D", markersize=3.5, color="black",
        markerfacecolor="white", label=what,
    )  # fmt: skip
    tallest = max(bottom.max(), totals.max())
    axes.set_ylim(0, max(axes.get_ylim()[1], 1.08 * tallest))  # keeps the limit of panels that share the axis
    axes.grid(axis="x", visible=False)
    for label in axes.get_xticklabels():
        label.set(rotation=50, ha="right", rotation_mode="anchor")


def note(axes: Axes, text: str) -> None:
    """Text in the upper right corner."""
    axes.annotate(text, (0.97, 0.93), xycoords="axes fraction", ha="right", va="top")


def legend_above(figure: Figure, axes: Axes | Iterable[Axes], columns: int) -> None:
    """One legend above all panels, for one panel's entries or for those of several with different ones."""
    panels = [axes] if isinstance(axes, Axes) else axes
    shown = [panel.get_legend_handles_labels() for panel in panels]
    named = {label: handle for entries in shown for handle, label in zip(*entries, strict=True)}
    figure.legend(
        named.values(), named.keys(), loc="outside upper center", ncols=columns, handlelength=2.6,
        columnspacing=1.2,
    )  # fmt: skip
