"""The 80 % interval of a predicted step time, from runs left out of fits (validation/intervals.py)."""

import numpy as np

from lowband.cost.numbers import Num
from lowband.predict.time import step_time
from lowband.predict.workload import Workload

# Where no run of the stack on the machine is known: the factor of all sources that were left out whole
# (table source_intervals, docs/predictor-errors.md).
ELSEWHERE = 1.28


def step_interval(job: Workload, step_s: Num) -> tuple[Num, Num]:
    """Fast and slow end of the interval around `step_s`, the predicted time of a step.

    Without an `error_factor` of the stack there, it is at least as wide as the constants' own intervals.
    """
    known = job.stack.error_factor
    if known is not None:
        return step_s / known.value, step_s * known.value
    fast, slow = step_time(job, "fast").total, step_time(job, "slow").total
    return np.minimum(fast, step_s / ELSEWHERE), np.maximum(slow, step_s * ELSEWHERE)
