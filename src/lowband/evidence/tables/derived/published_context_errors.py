"""What papers on long sequences print beside what is predicted, by quantity. off: in % of what was printed.

use  as it is: nothing fitted; fitted: the cell on which a number was; held out: the others
"""

import pandas as pd

from lowband.evidence.tables.view import View

VIEW = View(
    add={"distance": "off_percent.abs()", "near": "distance <= 10"},
    by=("provenance", "source", "quantity", "use"),
    of={
        "rows": "size", "median_off": "median distance", "max_off": "max distance", "within_10": "sum near",
        "least_predicted": "min predicted",
    },
)  # fmt: skip


def build(published_context: pd.DataFrame, published_lengths: pd.DataFrame) -> pd.DataFrame:
    """One row per quantity and use."""
    return VIEW.rows(pd.concat([published_context, published_lengths], ignore_index=True))
