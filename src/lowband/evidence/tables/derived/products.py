"""Errors of predicted products on a processor, in percent: mean and largest by method and kind of shape."""

import pandas as pd

from lowband.evidence.validation.products import compare, errors


def build(timings: pd.DataFrame) -> pd.DataFrame:
    """One row per kind of shape, and one of all. timings: results/reference/products/products.csv"""
    return errors(compare(timings)).assign(provenance="predicted")
