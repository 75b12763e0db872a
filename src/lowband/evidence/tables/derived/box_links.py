"""Collectives alone on a box's shaped links: time over the closed form's, counted bytes over the ledger's.

is_long                   the closed form is a second or more: a hop's start-up and end costs are negligible
time_over_closed_form, _min, _max          median, least and largest over repeats
interface_over_ledger, _min, _max          median, least and largest over repeats
time_error_percent        absolute deviation of the median from 1
interface_error_percent   absolute deviation of the median from cost.tcp.WIRE_BYTES_PER_BYTE
"""

import pandas as pd

from lowband.cost.tcp import WIRE_BYTES_PER_BYTE

CASE = ["cluster", "ranks", "level", "collective", "partners", "bytes", "closed_form_s"]


def build(comm: pd.DataFrame) -> pd.DataFrame:
    """One row per collective and length of message."""
    df = comm.assign(
        time_over_closed_form=comm["took_s"] / comm["closed_form_s"],
        interface_over_ledger=comm["interface_bytes"] / comm["bytes"],
    )
    groups = df.groupby(CASE, sort=False)
    ratios = {
        f"{column}{suffix}": (column, statistic)
        for column in ("time_over_closed_form", "interface_over_ledger")
        for suffix, statistic in (("", "median"), ("_min", "min"), ("_max", "max"))
    }
    table = groups.agg(repeats=("repeat", "size"), **ratios).reset_index()
    table.insert(0, "provenance", "measured")
    table["is_long"] = table["closed_form_s"] >= 1
    table["time_error_percent"] = 100 * (table["time_over_closed_form"] - 1).abs()
    table["interface_error_percent"] = 100 * (table["interface_over_ledger"] / WIRE_BYTES_PER_BYTE - 1).abs()
    return table
