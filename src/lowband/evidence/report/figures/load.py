"""Time and memory of commands against the number of runs or lines, with their goals."""

import pandas as pd
from matplotlib.figure import Figure

from lowband.evidence.report.figures.style import TWO_COLUMNS, canvas, legend_above
from lowband.evidence.tables.derived.load import GOALS

_PARTS = {
    "plan": ("o", "C0", "Snakemake plans runs"),
    "run": ("D", "C3", "Snakemake does runs of 3 steps"),
    "collect": ("s", "C1", "collect, runs of 1,000 steps"),
    "import-log": ("^", "C2", "import-log, lines"),
}

NO_GOAL = (0, None, None)


def draw(df: pd.DataFrame) -> Figure:
    figure = canvas(TWO_COLUMNS, 2.3)
    times, memory = figure.subplots(1, 2)
    for part, (marker, colour, label) in _PARTS.items():
        rows = df[df["part"] == part]
        size, limit_s, limit_bytes = GOALS.get(part, NO_GOAL)
        for axes, column, limit, unit in (
            (times, "cpu_s", limit_s, 1),
            (memory, "peak_bytes", limit_bytes, 2**20),
        ):
            axes.plot(rows["size"], rows[column] / unit, marker, color=colour, linestyle="-", label=label)
            if limit is not None:
                axes.plot(size, limit / unit, "_", color=colour, markersize=14, markeredgewidth=1.5)
    for axes, title in ((times, "processor time (s)"), (memory, "peak resident memory (MiB)")):
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("runs or lines")
        axes.set_ylabel(title)
    legend_above(figure, times, columns=3)
    return figure
