"""Bytes that a rank sends in a steady step, and that the fullest rank holds, of each point.

Kinds without a closed form have an empty one.
"""

import pandas as pd

from lowband.evidence.tables.points import POINT

WHAT = ("level", "collective", "wire", "state")  # of bytes sent the first three, of bytes held the last
BYTES = ("counted_bytes", "held_bytes", "closed_form_bytes", "difference_bytes")


def build(rows: pd.DataFrame) -> pd.DataFrame:
    """A row per point and kind of bytes; all repeats have the same. rows: table `bytes` or `states`"""
    what, columns = ([name for name in names if name in rows] for names in (WHAT, BYTES))
    return rows.groupby([*POINT, *what], sort=False)[columns].max().reset_index()
