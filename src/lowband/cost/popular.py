"""What copies of popular experts spare, from how full the fullest rank is.

Of n ranks the fullest has, we take it, the most popular of E experts and E / n - 1 ordinary ones. So with X
times the mean load, p_1 of pairs are the most popular expert's:

    X = n (p_1 + (E / n - 1) (1 - p_1) / (E - 1))

and others are popular by Zipf's law that begins with p_1, p_e = p_1 e^-s. Only those with more than the mean
have copies (engine.parallel.hot_experts). If the c most popular have one in each of N groups, a pair of
theirs, q = p_1 + ... + p_c of all, stays in its group, and each copy computes an N-th of its expert's. The
fullest rank is then that of the first copy, or of the first expert without any:

    X' = n (max(p_1 / N, p_(c+1)) + (E / n - 1) (1 - q) / (E - c))

at least 1 and at most X. Popular experts that meet on one rank are not counted, nor other pairs of a token
that cross anyway: beside what 16 ranks drew (results/reference/routes) X' and 1 - q are up to 13 % too low.
"""

from bisect import bisect_left
from functools import cache
from typing import Any  # of numpy's arrays

import numpy as np

_STEEPEST, _STEP = 64.0, 1e-6  # of exponents: with the first the most popular expert has all


@cache
def with_copies(
    experts: int, top_k: int, ranks: int, groups: int, copies: int, load: float
) -> tuple[float, float]:
    """The fullest rank's load behind copies, as a multiple of the mean; and the part of pairs that may still
    cross between groups: of all 1.

    ranks: with different experts; groups: of these, that have a copy each; load: without copies
    """
    others = (experts // ranks - 1) / max(experts - 1, 1)
    first = min((load / ranks - others) / (1 - others), 1 / top_k)
    if not copies or first * experts <= 1:
        return load, 1.0
    shares = _zipf(experts, first)
    copied = min(copies, int((shares * experts > 1).sum()))
    stays = shares[:copied].sum()
    rest = (experts // ranks - 1) * (1 - stays) / (experts - copied)
    fullest = ranks * (max(first / groups, shares[copied]) + rest)
    return float(np.clip(fullest, 1.0, load)), float(1 - stays)


def _zipf(experts: int, first: float) -> Any:
    """Shares of experts, of which the first has this one."""
    places = np.arange(1, experts + 1, dtype=float)
    steps = bisect_left(
        range(round(_STEEPEST / _STEP)), first, key=lambda step: 1 / (places ** (-step * _STEP)).sum()
    )
    return first * places ** (-steps * _STEP)
