"""The room that a job leaves in its device's memory."""

from dataclasses import dataclass

from lowband.predict.footprint import GIB
from lowband.predict.prediction import Prediction
from lowband.predict.workload import Workload


@dataclass(frozen=True)
class Room:
    """Bytes per rank.

    capacity: the device's memory
    headroom: capacity less the peak, the runtime included; negative: so much is missing
    low, high: of the headroom, with the runtime at either end of its interval
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
    capacity = device.memory_gib * GIB
    headroom = capacity - float(prediction.peak_memory_bytes)
    runtime = device.framework_gib
    if runtime is None:
        return Room(capacity, headroom, headroom, headroom)
    less, more = ((runtime.value - runtime.at(end)) * GIB for end in ("high", "low"))
    return Room(capacity, headroom, headroom + less, headroom + more)
