"""The type of a predicted quantity, one number or an array with one entry per point of a grid; units."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Num = float | NDArray[Any]

GIGA = 1e9
GIB = 2**30


def stacked(shape: tuple[int, ...], points: Sequence[Mapping[str, Num]]) -> dict[str, Num]:
    """Quantities by name, of each point of a grid, as one entry per point. What a point lacks is 0."""
    names = dict.fromkeys(name for point in points for name in point)
    return {name: np.reshape([point.get(name, 0.0) for point in points], shape)[()] for name in names}


def join(a: Num, b: Num, overlap: float) -> Num:
    """Seconds of two concurrent activities when only the share `overlap` of the shorter can hide."""
    return np.maximum(a, b) + (1 - overlap) * np.minimum(a, b)
