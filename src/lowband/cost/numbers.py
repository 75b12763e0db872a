"""The type of a predicted quantity: one number, or an array with one entry per point of a grid."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Num = float | NDArray[Any]


def join(a: Num, b: Num, overlap: float) -> Num:
    """Seconds of two concurrent activities when only the share `overlap` of the shorter can hide."""
    return np.maximum(a, b) + (1 - overlap) * np.minimum(a, b)
