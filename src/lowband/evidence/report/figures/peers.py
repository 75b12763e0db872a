"""Our step time (left, with the range over repeats) and peak memory (right) over a peer's; 1 is a draw."""

from itertools import cycle

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import TWO_COLUMNS, canvas, legend_above, looks
from lowband.evidence.tables.points import NO_CONDITION

RATIOS = {"step_time_ratio": "step time, ours / {peer}", "memory_ratio": "peak memory, ours / {peer}"}

GROUP = ["cluster", "compute_dtype", "ranks", "suite", "model", "seq_len", "condition"]


def draw(df: pd.DataFrame) -> Figure:
    peers = list(dict.fromkeys(df["peer"]))
    figure = canvas(TWO_COLUMNS, 0.4 + 2.2 * len(peers))
    grid = figure.subplots(len(peers), 2, squeeze=False)
    hatches = dict(zip(looks(df["scheme"]), cycle(("", "////", "....", "xxxx")), strict=False))
    for row, peer in zip(grid, peers, strict=True):
        for axes, (column, label) in zip(row, RATIOS.items(), strict=True):
            _bars(axes, df[df["peer"] == peer], column, hatches)
            axes.set_ylabel(label.format(peer=peer))
    legend_above(figure, list(grid[:, 0]), columns=6)
    return figure


def _bars(axes: Axes, df: pd.DataFrame, column: str, hatches: dict[str, str]) -> None:
    groups = list(dict.fromkeys(df[GROUP].itertuples(index=False, name=None)))
    schemes = looks(df["scheme"])
    width = 0.8 / len(schemes)
    for i, (scheme, look) in enumerate(schemes.items()):
        rows = df[df["scheme"] == scheme].set_index(GROUP).reindex(pd.MultiIndex.from_tuples(groups))
        places = [g + (i - (len(schemes) - 1) / 2) * width for g in range(len(groups))]
        axes.bar(
            places, rows[column], width * 0.92, color=look.color, hatch=hatches[scheme], edgecolor="white",
            linewidth=0, label=scheme,
        )  # fmt: skip
        if f"{column}_low" in rows:
            axes.vlines(places, rows[f"{column}_low"], rows[f"{column}_high"], color="0.2", linewidth=0.7)
    axes.axhline(1, color="0.2", linewidth=0.8)
    axes.set_xticks(range(len(groups)), [_label(*group) for group in groups])
    axes.grid(axis="x", visible=False)


def _label(cluster: str, dtype: str, ranks: int, *others: object) -> str:
    condition = others[-1]
    return f"{cluster}\n{dtype}\n{ranks} ranks" + ("" if condition == NO_CONDITION else f"\n{condition}")
