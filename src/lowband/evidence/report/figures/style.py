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

from lowband.cost.numbers import GIB
from lowband.evidence.tables.points import EXPERIMENT, NO_CONDITION

# Inches: one and two columns of an IEEE page (IEEE Author Center).
ONE_COLUMN, TWO_COLUMNS = 3.5, 7.16
POINTS = 8  # font size in print
MOST_POINTS = 200  # of one source; of more, quantiles are drawn (`spread`)


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
            **({"linewidth": 2.2, "zorder": 3} if self.color == HERO else {}),
        }  # fmt: skip


HERO = "#d55e00"  # the one strong colour, of the paper's scheme
# What needs no colour of its own has one of these, from dark to light.
_GREYS = ("0.2", "0.35", "0.5", "0.3", "0.4", "0.45", "0.55", "0.4")
_OTHERS = [color for i, color in enumerate(sns.color_palette("colorblind", 10).as_hex()) if i not in (3, 7)]
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
_DASHES: tuple[Dash, ...] = (
    "-", (0, (4, 1.2)), (0, (1, 1)), (0, (5, 1, 1, 1)), (0, (3, 1)), (0, (6, 2)), (0, (2, 1)),
    (0, (4, 1, 1, 1, 1, 1)), (0, (1, 2)), (0, (5, 3)),
)  # fmt: skip

# The order of the schemes, and the colours of those that are told apart from the baselines. The only home of
# both: a scheme's place fixes its look in every figure, and its place in each. Others follow by name.
_PLACES = (
    "ddp", "zero1", "zero2", "zero3", "hpz", "zeropp", "hsdp", "mics", "hier3-exact", "hier3", "planned",
)  # fmt: skip
_STRONG = {
    "hier3": Look(HERO, "o", "-"), "hier3-exact": Look("#e5a077", "s", (0, (4, 1.2))),
    "zeropp": Look("#0173b2", "D", "-"), "zero3": Look("0.15", "^", "-"),
    "planned": Look("#029e73", "P", "-"),
}  # fmt: skip


def in_order(schemes: Iterable[str]) -> list[str]:
    """The schemes, each once, in the order of every figure."""
    names = set(schemes)
    return [name for name in _PLACES if name in names] + sorted(names - set(_PLACES))


def looks(schemes: Iterable[str]) -> dict[str, Look]:
    """Scheme -> look, in the order of every figure."""
    names = in_order(schemes)
    others = [name for name in names if name not in _PLACES]
    return {name: _look(name, others) for name in names}


def _look(name: str, others: Sequence[str]) -> Look:
    if name in _STRONG:
        return _STRONG[name]
    if name in _PLACES:
        i = _PLACES.index(name)
        return Look(_GREYS[i % len(_GREYS)], _MARKERS[i % 10], _DASHES[i % 10])
    i = others.index(name)
    # Beyond all colours, markers are shifted against them, so that no pair repeats.
    color = _OTHERS[i % len(_OTHERS)]
    return Look(color, _MARKERS[(i + i // len(_OTHERS)) % 10], _DASHES[i % 10])


# Dark beside light, so that neighbours are told apart in grey; the strong colour is not among them.
_SHADES = ("#0173b2", "#8ec7e8", "#029e73", "#a5dcc8", "#7a4ea3", "#cdb8e3", "#946c00", "#ecd9a0")


def shades(names: Sequence[str]) -> dict[str, str]:
    """A fill for each part of stacked bars."""
    return {name: _SHADES[i % len(_SHADES)] for i, name in enumerate(names)}


def canvas(width: float, height: float) -> Figure:
    """An empty figure with automatic layout that needs no window system. Sizes in inches."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def nothing_to_draw(table: str, needed: str = "row") -> Figure:
    """A placeholder figure: a suite may measure nothing for it, or every run may have failed."""
    figure = canvas(ONE_COLUMN, 1)
    said = f"{table} has no {needed} to draw" if needed == "row" else f"{table} has not\n{needed} to compare"
    figure.text(0.5, 0.5, said, ha="center", va="center")
    return figure


def experiments(df: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(title, rows) of each experiment; each gets its own panels. A lone measured one needs no title."""
    groups = df.groupby(EXPERIMENT, sort=False)
    lone = len(groups) == 1 and (df["provenance"] == "measured").all()
    return [("" if lone else _title(rows.iloc[0]), rows) for _, rows in groups]


LABEL = "label"  # of a row of `compared`: what tells it from the others


def compared(df: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """(title, rows) of experiments that differ in their condition alone, with LABEL: scheme and condition.

    In order of the schemes. One with a single label is left out: there is nothing to compare it with.
    """
    labelled = df.assign(**{LABEL: df["scheme"]})
    has_condition = df["condition"] != NO_CONDITION
    labelled.loc[has_condition, LABEL] = df["scheme"] + ", " + df["condition"]
    place = {scheme: i for i, scheme in enumerate(in_order(df["scheme"]))}
    labelled = labelled.sort_values("scheme", key=lambda scheme: scheme.map(place), kind="stable")
    keys = [column for column in EXPERIMENT if column != "condition"]
    groups = [rows for _, rows in labelled.groupby(keys, sort=False) if len(set(rows[LABEL])) > 1]
    groups.sort(key=lambda rows: list(df["suite"]).index(rows["suite"].iloc[0]))
    return [(_title(rows.iloc[0], NO_CONDITION), rows) for rows in groups]


def _title(row: "pd.Series[Any]", condition: str | None = None) -> str:
    where = f"{row['suite']} ({row['provenance']} on {row['cluster']})"
    what = f"{row['engine']}, {row['model']}, sequence {row['seq_len']}, {row['compute_dtype']}"
    condition = row["condition"] if condition is None else condition
    return "\n".join([where, what, *([] if condition == NO_CONDITION else [condition])])


def by_scheme(rows: pd.DataFrame, x: str) -> Iterator[tuple[str, Look, pd.DataFrame]]:
    """Each scheme with its look and its rows in the order of column `x`."""
    for scheme, look in looks(rows["scheme"]).items():
        yield scheme, look, rows[rows["scheme"] == scheme].sort_values(x, kind="stable")


def band(axes: Axes, rows: pd.DataFrame, x: str, low: str, high: str, color: str) -> None:
    """A pale band between two columns."""
    axes.fill_between(rows[x], rows[low], rows[high], color=color, alpha=0.15, linewidth=0)


def spread(axes: Axes, place: float, values: pd.Series, colour: str) -> None:
    """Quantiles of values that would be one black block as points: 5 to 95 %, 25 to 75 % and the median."""
    low, quarter, middle, upper, high = values.quantile([0.05, 0.25, 0.5, 0.75, 0.95])
    axes.vlines(place, low, high, color=colour, linewidth=0.8)
    axes.vlines(place, quarter, upper, color=colour, linewidth=3.5)
    axes.plot([place], [middle], "o", markersize=3, color="white", markeredgecolor=colour, zorder=3)


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
    return (GIB, "GiB") if largest >= GIB else (2**20, "MiB")


def time_unit(longest: float) -> tuple[float, str]:
    """(seconds, name) of the unit for an axis that goes up to `longest` seconds."""
    return next(
        ((unit, name) for unit, name in ((1, "seconds"), (1e-3, "milliseconds")) if longest >= 0.1 * unit),
        (1e-6, "microseconds"),
    )


def stacked_bars(axes: Axes, parts: pd.DataFrame, totals: pd.Series, what: str) -> None:
    """One bar per row of `parts` from the top, stacked from its columns, and a marker at each row's total."""
    start = pd.Series(0.0, index=parts.index)
    for part, color in shades(list(parts.columns)).items():
        label = part.replace("_", " ")
        axes.barh(parts.index, parts[part], left=start, color=color, linewidth=0, height=0.72, label=label)
        start = start + parts[part]
    axes.plot(
        totals, totals.index, linestyle="", marker="D", markersize=3, color="black", markeredgewidth=0.7,
        markerfacecolor="white", label=what,
    )  # fmt: skip
    longest = max(start.max(), totals.max())
    axes.set_xlim(0, max(axes.get_xlim()[1], 1.06 * longest))  # keeps the limit of panels that share the axis
    axes.set_ylim(len(parts) - 0.45, -0.55)
    axes.grid(axis="y", visible=False)
    scheme_ticks(axes, list(parts.index))


def scheme_ticks(axes: Axes, labels: Sequence[str]) -> None:
    """The schemes at the y axis, from the top: the paper's in the strong colour."""
    axes.set_yticks(range(len(labels)), labels)
    for tick in axes.get_yticklabels():
        if tick.get_text().split(",")[0] == "hier3":
            tick.set(color=HERO, fontweight="bold")


class End(NamedTuple):
    """Where a line ends, in data, and the label that it gets there."""

    label: str
    x: float
    y: float
    color: str


def label_ends(axes: Axes, ends: Sequence[End], inches: float) -> None:
    """Write each label right of the axes at the height of its line's end; those too near move apart.

    Call it when the axes have their final limits. inches: height of the axes, about.
    """
    to_axes = axes.transData + axes.transAxes.inverted()
    gap = 1.25 * POINTS / 72 / inches
    placed = sorted(
        ((float(to_axes.transform((end.x, end.y))[1]), end) for end in ends), key=lambda it: it[0]
    )
    heights = [height for height, _ in placed]
    for _ in range(200):  # push neighbours apart until none is nearer than a line of text
        for i in range(len(heights) - 1):
            short = gap - (heights[i + 1] - heights[i])
            if short > 1e-6:
                heights[i], heights[i + 1] = heights[i] - short / 2, heights[i + 1] + short / 2
    lift = max(0.0, -min(heights, default=0.0))  # nothing below the axes, where their labels are
    heights = [height + lift for height in heights]
    for height, (_, end) in zip(heights, placed, strict=True):
        is_hero = end.color == HERO
        axes.annotate(
            end.label, (end.x, end.y), (1.04, height), xycoords="data", textcoords="axes fraction",
            va="center", color=end.color, fontweight="bold" if is_hero else "normal", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": end.color, "linewidth": 0.5, "shrinkA": 1, "shrinkB": 4},
        )  # fmt: skip


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
