"""Throughput of one scheme over another's in a scale model, under every condition measured, and as reported.

One row per pair of schemes and point of the first. Reported rows have no condition: the paper states neither
its batch nor the rate that the links attained.
"""

import pandas as pd

from lowband.tables.derived import box

PAIRS = {
    "zeropp / zero3": ("zeropp", "zero3"),
    "hier3 / zero3": ("hier3", "zero3"),
    "hier3 / zeropp": ("hier3", "zeropp"),
}
CONDITIONS = [
    "point", "suite", "cluster", "condition", "ranks", "tokens_per_rank", "accumulation", "overlap",
    "outer_link_share", "links", "repeats",
]  # fmt: skip

# The rows of the paper's ratios in results/reported/: metric and scheme; gains are in percent.
_GAINS = {
    "zeropp / zero3": ("TFLOPS per GPU gain", "ZeRO++ ported to AMD"),
    "hier3 / zero3": ("TFLOPS per GPU gain, maximum", "proposed 3-level partitioning"),
    "hier3 / zeropp": ("TFLOPS per GPU gain", "proposed 3-level partitioning"),
}


def build(runs: pd.DataFrame, reported: pd.DataFrame) -> pd.DataFrame:
    """reported: results/reported/01_frontier_low_bandwidth_2501.04266.csv"""
    points = box.build(runs)
    parts = []
    for pair, (scheme, over) in PAIRS.items():
        rows = points.loc[points["scheme"] == scheme, [*CONDITIONS, f"over_{over}"]]
        rows = rows.rename(columns={f"over_{over}": "ratio"}).assign(pair=pair, provenance="measured")
        parts.append(rows[rows["ratio"].notna()])
    for pair, (metric, scheme) in _GAINS.items():
        row = reported[(reported["metric"] == metric) & (reported["scheme"] == scheme)]
        gain = float(row["value"].iloc[0])
        reported_row = {"pair": pair, "provenance": "reported", "ranks": int(row["gcds"].iloc[0].split()[0])}
        parts.append(pd.DataFrame([{**reported_row, "ratio": 1 + gain / 100}]))
    return pd.concat(parts, ignore_index=True)
