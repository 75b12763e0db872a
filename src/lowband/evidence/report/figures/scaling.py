"""Step time of the schemes at equal ranks; where ranks have devices of their own, how they scale, too."""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from lowband.box.network import SHAPED
from lowband.evidence.report.figures import style
from lowband.evidence.tables.points import EXPERIMENT

TIMES = ["step_time_s", "step_time_q20_s", "step_time_q80_s"]
RATES = ["tokens_per_s", "tokens_per_s_q20", "tokens_per_s_q80"]
COLUMNS = [
    *EXPERIMENT, "scheme", "ranks", "scaling", "links", "peak_flop_per_s_per_rank", *TIMES, *RATES,
    "base_ranks", "efficiency",
]  # fmt: skip


def data(table: pd.DataFrame) -> pd.DataFrame:
    """The measured points."""
    return table.loc[table["tokens_per_s"].notna(), COLUMNS]


def draw(df: pd.DataFrame) -> Figure:
    scaled = style.experiments(df[_scales(df)])
    equal = style.compared(df)
    if not scaled and not equal:
        return style.nothing_to_draw("scaling.csv", "two points")
    heights = [2.3 for _ in scaled] + [0.9 + 0.17 * rows[style.LABEL].nunique() for _, rows in equal]
    figure = style.canvas(style.TWO_COLUMNS, sum(heights))
    parts = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, (title, rows) in zip(parts, [*scaled, *equal], strict=True):
        (_lines if style.LABEL not in rows else _times)(part, title, rows)
    return figure


def _scales(df: pd.DataFrame) -> "pd.Series[bool]":
    """Rows of experiments on several numbers of ranks, each rank on a device of a known peak.

    Ranks that share a host's cores scale as the host does, not as their scheme.
    """
    several = df.groupby(EXPERIMENT)["ranks"].transform("nunique") > 1
    return several & df["peak_flop_per_s_per_rank"].notna() & (df["links"] != SHAPED)


def _times(part: SubFigure, title: str, rows: pd.DataFrame) -> None:
    """Dots in one panel for each number of ranks; each panel has its own axis, from 0."""
    ranks = sorted(rows["ranks"].unique())
    labels = list(dict.fromkeys(rows[style.LABEL]))
    panels = part.subplots(1, len(ranks), sharey=True, squeeze=False)[0]
    for axes, count in zip(panels, ranks, strict=True):
        here = rows[rows["ranks"] == count].set_index(style.LABEL).reindex(labels)
        for place, (_, row) in enumerate(here.iterrows()):
            color = style.HERO if row["scheme"] == "hier3" else "0.25"
            axes.hlines(place, row["step_time_q20_s"], row["step_time_q80_s"], color=color, linewidth=1.2)
            axes.plot(row["step_time_s"], place, "o", color=color, markersize=4)
        axes.set_xlim(0, 1.08 * here["step_time_q80_s"].max())
        axes.set_xlabel(f"seconds of a step, {count} rank{'s' if count > 1 else ''}")
    style.scheme_ticks(panels[0], labels)
    panels[0].set_ylim(len(labels) - 0.5, -0.5)
    panels[0].set_title(title, loc="left")


def _lines(part: SubFigure, title: str, rows: pd.DataFrame) -> None:
    """Throughput (left) and efficiency (right) against ranks."""
    left, right = part.subplots(1, 2)
    ends = []
    for scheme, look, line in style.by_scheme(rows, "ranks"):
        middle = line["tokens_per_s"].to_numpy()
        spread = np.abs(line[["tokens_per_s_q20", "tokens_per_s_q80"]].to_numpy().T - middle)
        left.errorbar(line["ranks"], middle, spread, **look.line, elinewidth=0.7)
        right.plot(line["ranks"], line["efficiency"], **look.line)
        ends.append(style.End(scheme, line["ranks"].iloc[-1], line["efficiency"].iloc[-1], look.color))
    _throughput_axis(left)
    style.one_line(right)
    right.set_ylim(bottom=0)
    right.set_ylabel(_efficiency_label(rows))
    for axes in (left, right):
        style.rank_ticks(axes, rows["ranks"])
    left.set_title(title, loc="left")
    style.label_ends(right, ends, 1.6)


def _throughput_axis(axes: Axes) -> None:
    axes.set_yscale("log", base=10)
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel("tokens/s")


def _efficiency_label(rows: pd.DataFrame) -> str:
    bases = sorted(set(rows["base_ranks"].astype(int)))
    named = "1 rank" if bases == [1] else f"{' or '.join(map(str, bases))} ranks"
    of = "weak-scaling efficiency\n" if (rows["scaling"] == "weak").all() else "efficiency "
    return f"{of}(base: {named})"
