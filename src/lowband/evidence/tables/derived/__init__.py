"""The derived tables that are more than a view, one per file: `build(raw tables) -> table`, pure.

None reads or writes a file.
"""

from typing import Any

import pandas as pd


def median_and_spread(groups: Any, column: str) -> pd.DataFrame:
    """Per group of a group-by: the column's median and its 20 % and 80 % quantiles.

    Their names end with the column's unit, as in time_s, time_q20_s, time_q80_s.
    """
    name, unit = (column.removesuffix("_s"), "_s") if column.endswith("_s") else (column, "")
    quantiles = {f"{name}_q{percent}{unit}": groups[column].quantile(percent / 100) for percent in (20, 80)}
    return pd.DataFrame({column: groups[column].median(), **quantiles})
