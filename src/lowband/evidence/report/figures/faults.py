"""Injected faults by kind: when each was detected, and whether all was as promised."""

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import TWO_COLUMNS, canvas, legend_above

PROMISED_S = 30


def draw(df: pd.DataFrame) -> Figure:
    kinds = list(dict.fromkeys(df["kind"]))
    figure = canvas(TWO_COLUMNS, 0.17 * len(kinds) + 0.9)
    times, counts = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1])
    looks = {True: ("o", "0.3", "as promised"), False: ("X", "C3", "not as promised")}
    for is_right, (marker, colour, label) in looks.items():
        rows = df[(df["is_right"] == is_right) & df["detected_s"].notna()]
        place = rows["kind"].map(kinds.index).to_numpy(dtype=float)
        spread = rows.groupby("kind").cumcount().to_numpy() % 5
        times.plot(
            rows["detected_s"], place + 0.1 * (spread - 2), marker, color=colour, markersize=3,
            markeredgewidth=0, linestyle="", label=label,
        )  # fmt: skip
        number = df[df["is_right"] == is_right].groupby("kind").size().reindex(kinds, fill_value=0)
        left = df[df["is_right"]].groupby("kind").size().reindex(kinds, fill_value=0) * (not is_right)
        counts.barh(np.arange(len(kinds)), number, left=left, color=colour, height=0.6)
    times.axvline(PROMISED_S, color="0.3", linestyle=":", linewidth=0.8)
    times.set_xscale("log")
    times.set_xticks([0.1, 1, 10, 30], ["0.1", "1", "10", "30"])
    times.set_xlabel("seconds until detected")
    times.set_yticks(np.arange(len(kinds)), kinds)
    times.invert_yaxis()
    counts.set_xlabel("cases")
    legend_above(figure, times, columns=2)
    return figure
