"""Throughput of one scheme over another's in a scale model, under every condition measured, and as reported.

One row per point and scheme of box.OVER that it is compared with. Reported rows have no condition: the paper
states neither its batch nor the rate that the links attained.

ratio_low, ratio_high  the slowest repeat over the fastest of the other, and the reverse
"""

import pandas as pd

from lowband.evidence.tables.derived import box
from lowband.evidence.tables.points import beside

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
    schemes = dict.fromkeys([*box.OVER, *points["scheme"]])
    parts: list[pd.DataFrame] = []
    for i, over in enumerate(box.OVER):
        for scheme in schemes:
            if scheme in box.OVER[: i + 1]:  # itself, or the inverse of an earlier pair
                continue
            rows = points[points["scheme"] == scheme]
            rows = beside(
                rows, points[points["scheme"] == over], "scheme", least_s="step_time_min_s",
                middle_s="step_time_s", most_s="step_time_max_s",
            )  # fmt: skip
            ratio = rows[f"over_{over}"]
            slow, fast = (rows["step_time_s"] / rows[f"step_time_{end}_s"] for end in ("max", "min"))
            ratios = rows[CONDITIONS].assign(
                ratio=ratio,
                pair=f"{scheme} / {over}",
                provenance="measured",
                ratio_low=ratio * slow * (rows["least_s"] / rows["middle_s"]),
                ratio_high=ratio * fast * (rows["most_s"] / rows["middle_s"]),
            )
            parts.append(ratios[ratios["ratio"].notna()])
    for pair, (metric, scheme) in _GAINS.items():
        row = reported[(reported["metric"] == metric) & (reported["scheme"] == scheme)]
        gain = float(row["value"].iloc[0])
        reported_row = {"pair": pair, "provenance": "reported", "ranks": int(row["gcds"].iloc[0].split()[0])}
        parts.append(pd.DataFrame([{**reported_row, "ratio": 1 + gain / 100}]))
    return pd.concat(parts, ignore_index=True)
