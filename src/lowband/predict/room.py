"""The room that a job leaves in its device's memory, and how sure that is.

A factor f, `MEMORY_ERROR`: of published peaks of memory 80 % were between the predicted one over f and times
f, each predicted without its model size (table intervals, docs/predictor-errors.md). All are torchtitan's, on
H100: with peaks of one publisher, none can be left out whole, as is done for step times.
"""

from dataclasses import dataclass

import numpy as np

from lowband.cost.numbers import GIB, Num
from lowband.errors import UserError
from lowband.predict.prediction import Prediction
from lowband.predict.workload import Workload
from lowband.spec.machine import Machine

MEMORY_ERROR = 1.092


class DoesNotFit(UserError):
    """Of a search: nothing that was asked for fits the memory."""


@dataclass(frozen=True)
class Room:
    """Bytes per rank.

    capacity: the device's memory
    headroom: capacity less the peak, the runtime included; negative: so much is missing
    low, high: of the headroom, by the model's error, and with the runtime at either end of its interval
    """

    capacity: float
    headroom: float
    low: float
    high: float


def room_of(job: Workload, prediction: Prediction) -> Room | None:
    """The room of one point; None if the device's memory is not known."""
    device = job.machine.device
    if device.memory_gib is None:
        return None
    capacity, peak = device.memory_gib * GIB, float(prediction.peak_memory_bytes)
    at_most, at_least = (float(surely(job.machine, peak, sign)) for sign in (1, -1))
    return Room(capacity, capacity - peak, capacity - at_most, capacity - at_least)


def surely(machine: Machine, peak: Num, sign: int = 1) -> Num:
    """The upper end of a peak's interval, or with sign -1 its lower end. peak: bytes, the runtime included"""
    runtime = machine.device.framework_gib
    by_model = peak * MEMORY_ERROR**sign
    if runtime is None:
        return by_model
    other = peak + (runtime.at("high" if sign > 0 else "low") - runtime.value) * GIB
    return np.maximum(by_model, other) if sign > 0 else np.minimum(by_model, other)
