"""The 80 % interval of a step time, from sources that were left out whole (validation/intervals.py).

A user's run is another source than those that the constants were fitted on, of which each errs in its own
way. So an interval is never narrower than what those left out whole show, each counting alike, however near
the rows of one source are to each other.
"""

from dataclasses import replace

import numpy as np

from lowband.cost.numbers import Num
from lowband.predict.time import step_time
from lowband.predict.workload import Workload
from lowband.spec.sourced import Fact
from lowband.spec.stack import Stack

# Table source_intervals, docs/predictor-errors.md: where the stack states its error on the machine, and
# anywhere else.
KNOWN = 1.13
ELSEWHERE = 1.36
# How long the host may take to launch a block's pass, of which few stacks state anything. A step takes longer
# by it where the device is faster than that: small blocks, short micro-batches, many ranks along tensor.
LAUNCH_US = Fact(
    value=2200,
    source="at most: steps of gpt-1.3b on one H100, 4,096 tokens without recomputation, on whose blocks the "
    "device waits for the host, by their 48 passes (results/reference/h100/runs.csv, engine lowband)",
)


def step_interval(job: Workload, step_s: Num) -> tuple[Num, Num]:
    """Fast and slow end of the interval around `step_s`, the predicted time of a step.

    Without an `error_factor` of the stack there, it is at least as wide as the constants' own intervals.
    """
    known = job.stack.error_factor
    factor = ELSEWHERE if known is None else max(known.value, KNOWN)
    fast, slow = step_s / factor, factor * _with_slow_host_s(job, step_s)
    if known is None:
        fast = np.minimum(fast, step_time(job, "fast").total)
        slow = np.maximum(slow, step_time(job, "slow").total)
    return fast, slow


def with_slow_host(stack: Stack) -> Stack:
    """The stack, if it states nothing of its host, with the slowest one."""
    return stack if stack.launch_us is not None else stack.model_copy(update={"launch_us": LAUNCH_US})


def _with_slow_host_s(job: Workload, step_s: Num) -> Num:
    """Seconds of a step. Ranks that share the host compute there: nothing is launched."""
    stack = with_slow_host(job.stack)
    if stack is job.stack or job.machine.device.memory_gib is None:
        return step_s
    return step_time(replace(job, stack=stack)).total
