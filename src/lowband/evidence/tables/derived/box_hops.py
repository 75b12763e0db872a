"""Flat rings and hops in the scale model: points as in box.py, of one suite.

between_nodes_bytes  that a rank sends over the outermost level, counted
"""

import pandas as pd

from lowband.evidence.tables.derived import box
from lowband.spec.mesh import WORLD

SUITE = "box-hops"


def build(runs: pd.DataFrame, sent: pd.DataFrame) -> pd.DataFrame:
    """One row per point. sent: raw table `bytes`"""
    points = box.build(runs)
    points = points[points["suite"] == SUITE]
    of_runs = sent[sent["level"] == WORLD].groupby(["point", "run_id"])["counted_bytes"].sum()
    between = of_runs.groupby("point").max()  # repeats send the same
    return points.assign(between_nodes_bytes=points["point"].map(between))
