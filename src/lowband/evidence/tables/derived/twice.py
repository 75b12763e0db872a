"""Runs and commands made twice, and runs beside those whose bits they must have (`python -m tests.twice`).

against           `itself`: made again in new processes; or the run that it is compared with
is_promised       whether the bits must be the same
first_difference  step and value, or file; `why` states the reason
"""

import pandas as pd

COLUMNS = ["provenance", "what", "against", "is_promised", "same", "first_difference", "why", "commit"]


def build(twice: pd.DataFrame) -> pd.DataFrame:
    """twice: rows of results/reference/twice/twice.csv"""
    return twice.assign(provenance="measured")[COLUMNS]
