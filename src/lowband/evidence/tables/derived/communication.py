"""Bytes that a rank sends in a steady step over each level, with the rate of that level's links.

rates_of          the machine with these rates: the run's own, or Frontier where the file of the run's machine
                  states none, as of a computer whose ranks share its memory
link_bytes_per_s  of one rank to its partners on the level: on the outermost one the run's, which may have
                  slower links than its machine, on others as published, divided by the scale in a scale
                  model; empty if that machine lacks the level
"""

import pandas as pd

from lowband.errors import UserError
from lowband.evidence.tables.derived import bytes_of_points
from lowband.spec.config import Config
from lowband.spec.mesh import WORLD

STATED = "frontier"  # for machines without rates: the core paper's


def build(sent: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """A row per point, level, collective and wire. sent: table `bytes`"""
    df, config = bytes_of_points.build(sent), Config()
    rates = {
        (cluster, level): _rate(config, cluster, level)
        for cluster in (*df["cluster"].unique(), STATED)
        for level in df["level"].unique()
    }
    own = pd.Series([rates[pair] for pair in zip(df["cluster"], df["level"], strict=True)], index=df.index)
    df["rates_of"] = df["cluster"].where(own.groupby(df["cluster"]).transform("count") > 0, STATED)
    df["link_bytes_per_s"] = [rates[pair] for pair in zip(df["rates_of"], df["level"], strict=True)]
    outer = df["point"].map(runs.groupby("point")["outer_link_bytes_per_s"].first())
    is_outer = (df["level"] == WORLD) & (df["rates_of"] == df["cluster"]) & outer.notna()
    df["link_bytes_per_s"] = df["link_bytes_per_s"].mask(is_outer, outer)
    return df


def _rate(config: Config, cluster: str, level: str) -> float:
    """Bytes per second; not a number if no file states it."""
    try:
        machine = config.machine(cluster)
        return machine.link(level).gigabytes_per_s * 1e9 / (machine.box.scale if machine.box else 1)
    except UserError:
        return float("nan")
