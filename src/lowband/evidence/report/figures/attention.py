"""Attention TFLOPS, forward and backward together, against sequence length; reported and measured."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import TWO_COLUMNS, Look, canvas, legend_above, looks

PROVENANCE_WIDTH = {"measured": 1.6, "reported": 0.8}


def draw(df: pd.DataFrame) -> Figure:
    df = df.assign(label=df["method"] + ", " + df["provenance"]).sort_values("seq_len", kind="stable")
    devices = list(dict.fromkeys(df.sort_index()["device"]))
    kinds = sorted(set(df[["is_causal", "head_dim"]].itertuples(index=False, name=None)))
    figure = canvas(TWO_COLUMNS, 1.9 * len(devices) + 0.5)
    panels = figure.subplots(len(devices), len(kinds), squeeze=False, sharex=True, sharey="row")
    look = looks(df.sort_index()["label"])
    for line, device in zip(panels, devices, strict=True):
        for axes, (is_causal, head) in zip(line, kinds, strict=True):
            rows = df[(df["device"] == device) & (df["is_causal"] == is_causal) & (df["head_dim"] == head)]
            _lines(axes, rows, look)
            axes.set_title(f"{device}\nhead {head}, {'causal' if is_causal else 'full'}", loc="left")
        line[0].set_ylabel("TFLOPS")
        line[0].set_ylim(bottom=0)
    for axes in panels[-1]:
        axes.set_xlabel("sequence length")
    legend_above(figure, panels.flat, columns=3)
    return figure


def _lines(axes: Axes, rows: pd.DataFrame, look: dict[str, Look]) -> None:
    for label, line in rows.groupby("label"):
        style, width = look[str(label)], PROVENANCE_WIDTH[line["provenance"].iloc[0]]
        axes.plot(
            line["seq_len"], line["tflops"], color=style.color, marker=style.marker, linestyle=style.dash,
            markersize=3, linewidth=width, label=label,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks([512, 2048, 8192], ["512", "2k", "8k"])
