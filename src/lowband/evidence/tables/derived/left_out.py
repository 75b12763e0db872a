"""Published rows, each left out of the fit that predicts it, with the interval of such a prediction.

kind, left_out   what the fold left out: a size, a scale, a machine
factor           published over predicted or the reverse, at least 1
interval_factor  of the 80 % interval, from other folds of this kind; of kind machine, from other machines
inside           whether the row lies in the interval; empty if there is none
Ratios are not among the rows: they say nothing of a time.
"""

import pandas as pd

from lowband.evidence.validation.intervals import covered


def build(folds: pd.DataFrame, held_out: pd.DataFrame) -> pd.DataFrame:
    """One row per row left out and kind of fold."""
    return covered(folds, held_out)
