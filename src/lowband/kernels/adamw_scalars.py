"""The factors of a step of AdamW, as both its definition and its kernel take them."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np


class Scalars(NamedTuple):
    """fp32 numbers: decay 1 - lr wd, step lr / (1 - b1^t), root 1 / sqrt(1 - b2^t)"""

    decay: float
    keep_first: float
    new_first: float
    keep_second: float
    new_second: float
    step: float
    root: float
    eps: float

    @classmethod
    @lru_cache(maxsize=8)  # asked for each parameter
    def of(
        cls, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, steps: int
    ) -> "Scalars":
        """steps: with this one"""
        first, second = betas
        exact = (
            1 - lr * weight_decay, first, 1 - first, second, 1 - second, lr / (1 - first**steps),
            (1 - second**steps) ** -0.5, eps,
        )  # fmt: skip
        return cls(*(float(np.float32(value)) for value in exact))
