"""A whole run of so many tokens: days, GPU-hours, energy; with checkpoints and failures at a stated rate.

    steps      tokens / tokens of a step
    days       steps x seconds of a step / (1 - d / t - (t / 2 + R) / M)
    M          mean hours between failures of one rank / ranks
    t          sqrt(2 d M), between checkpoints; d: seconds for which training waits for one; R: until it runs
               again after a failure
    energy     ranks x (peak power x the share of time in which they compute + idle power x the rest)

Source of t and of what is lost: Young (1974, doi 10.1145/361147.361115), first order in t / M. Energy is of
the devices alone, without hosts, network and cooling, and at most this: a device may compute at less than its
peak power.
"""

import math
from dataclasses import dataclass

import numpy as np

from lowband.errors import UserError
from lowband.predict.prediction import Prediction
from lowband.predict.time import COMPUTED
from lowband.predict.workload import Workload
from lowband.spec.machine import Power

DAY_S, HOUR_S = 86400, 3600


@dataclass(frozen=True)
class Conditions:
    """What a run meets. All in seconds; of a failure none: nothing fails.

    between_failures_s: of one rank, the mean; restart_s: until training goes on
    checkpoint_s:       for which training waits
    """

    tokens: float
    between_failures_s: float | None = None
    restart_s: float = 0.0
    checkpoint_s: float = 0.0


@dataclass(frozen=True)
class WholeRun:
    """checkpoint_every_s: None if nothing fails; lost: share of the run in checkpoints, failures and what is
    done again; megawatt_hours: least and most, None if the device's power is not known"""

    steps: float
    days: float
    days_fast: float
    days_slow: float
    gpu_hours: float
    checkpoint_every_s: float | None
    failures: float
    lost: float
    megawatt_hours: tuple[float, float] | None
    power: Power | None


def whole_run(job: Workload, prediction: Prediction, given: Conditions) -> WholeRun:
    """Of one point. Raises UserError if ranks fail faster than they can start again."""
    steps = given.tokens / float(job.tokens)
    every, overhead = _failing(job.ranks, given)
    seconds, fast, slow = (
        steps * float(time) * (1 + overhead)
        for time in (prediction.step_time_s, prediction.step_time_fast_s, prediction.step_time_slow_s)
    )
    failures = 0.0 if given.between_failures_s is None else seconds * job.ranks / given.between_failures_s
    power = job.machine.device.power
    computes = sum(float(prediction.time_s[name]) for name in COMPUTED) / float(prediction.step_time_s)
    return WholeRun(
        steps, seconds / DAY_S, fast / DAY_S, slow / DAY_S, job.ranks * seconds / HOUR_S, every, failures,
        overhead / (1 + overhead), _energy(power, job.ranks * seconds, computes / (1 + overhead)), power,
    )  # fmt: skip


def _failing(ranks: int, given: Conditions) -> tuple[float | None, float]:
    """Seconds between checkpoints, and what is lost as a multiple of the time that trains."""
    if given.between_failures_s is None:
        return None, 0.0
    mean = given.between_failures_s / ranks
    every = math.sqrt(2 * given.checkpoint_s * mean)
    waits = given.checkpoint_s / every if every else 0.0
    lost = waits + (every / 2 + given.restart_s) / mean
    if lost >= 1:
        what = f"{ranks} ranks fail every {mean:.3g} s in the mean: more is lost than done"
        raise UserError(what, where="--hours-between-failures", allowed="fewer failures, or a faster restart")
    return every, lost / (1 - lost)


def _energy(power: Power | None, rank_seconds: float, busy: float) -> tuple[float, float] | None:
    """Megawatt-hours, least and most. busy: share of the time in which a rank computes"""
    if power is None:
        return None
    peak, idle = power.peak_watts.value, power.idle_watts
    ends = (0.0, peak) if idle is None else (idle.value, idle.value)
    watts = np.array([busy * peak + (1 - busy) * waiting for waiting in ends])
    least, most = (float(each) for each in rank_seconds * watts / HOUR_S / 1e6)
    return least, most
