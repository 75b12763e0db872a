"""Pipelines' schedules, action by action: as they ran on four ranks, above what the timeline predicts."""

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lowband.evidence.report.figures.style import TWO_COLUMNS, canvas

SEND = 0.25  # over a forward: one of those that were measured
SHOWN = ("1f1b", "zb-v", "searched")
COLOURS = {"forward": "C0", "backward": "C1", "input": "C1", "weight": "C2"}
IDLE = "0.8"
NAMES = {"forward": "forward", "input": "backward, or its input part", "weight": "weight part"}


def data(table: pd.DataFrame) -> pd.DataFrame:
    """Actions of the shown schedules."""
    df = table[table["schedule"].isin(SHOWN) & (table["send_over_forward"] == SEND)]
    columns = ["schedule", "rank", "kind", "stage", "micro_batch", "seconds", "end_s", "predicted_end_s"]
    return df[columns]


def _with_starts(df: pd.DataFrame) -> pd.DataFrame:
    """With when each action started."""
    df = df.copy()
    before = df.groupby(["schedule", "rank"], sort=False)[["end_s", "predicted_end_s"]].shift(fill_value=0.0)
    for column in ("end_s", "predicted_end_s"):
        # a rank that came late to its action has computed it since the one before
        df[column.replace("end", "start")] = (df[column] - df["seconds"]).clip(lower=before[column])
    return df


def draw(df: pd.DataFrame) -> Figure:
    df = _with_starts(df)
    figure = canvas(TWO_COLUMNS, 1.35 * len(SHOWN) + 0.5)
    panels = figure.subplots(len(SHOWN), 1, sharex=True, squeeze=False)[:, 0]
    for axes, schedule in zip(panels, SHOWN, strict=True):
        rows = df[df["schedule"] == schedule]
        shares = [_lanes(axes, rows, *each) for each in (("", -0.4, 0.5), ("predicted_", 0.12, 0.26))]
        axes.set_title(
            f"{schedule}: bubble {shares[0]:.1%} measured, {shares[1]:.1%} predicted", loc="left", pad=3
        )
        axes.set_yticks(sorted(rows["rank"].unique()))
        axes.invert_yaxis()
        axes.set_ylabel("rank")
        axes.grid(visible=False)
    panels[-1].set_xlabel("seconds (wide: measured; narrow: predicted)")
    entries = [Patch(color=COLOURS[kind], label=label) for kind, label in NAMES.items()]
    figure.legend(
        handles=[*entries, Patch(color=IDLE, label="idle")],
        loc="outside upper center",
        ncols=len(entries) + 1,
    )
    return figure


def _lanes(axes: Axes, rows: pd.DataFrame, of: str, offset: float, height: float) -> float:
    """Bars of all ranks on the shade of the whole step; returns the idle share."""
    ranks = sorted(rows["rank"].unique())
    end = float(rows[f"{of}end_s"].max())
    for rank in ranks:
        axes.broken_barh([(0, end)], (rank + offset, height), color=IDLE, linewidth=0)
    for rank, kind, start, stop in zip(
        rows["rank"], rows["kind"], rows[f"{of}start_s"], rows[f"{of}end_s"], strict=True
    ):
        axes.broken_barh(
            [(start, stop - start)], (rank + offset, height), facecolor=COLOURS[kind], edgecolor="white",
            linewidth=0.3,
        )  # fmt: skip
    stated_s = float((rows["predicted_end_s"] - rows["predicted_start_s"]).sum())  # what its actions take
    return 1 - stated_s / (len(ranks) * end)
