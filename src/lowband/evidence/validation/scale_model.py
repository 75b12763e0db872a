"""Time that a run in a scale model (docs/scale-model.md) should take, by the rates of its box alone.

Matrix products run at the paced rate, links at their stated rates, collectives as the engine sends them, hop
by hop or flat; nothing else takes time, nothing is fitted, and all is multiplied by the scale. All schemes
therefore have equal forward and backward computation and differ only in exposed communication.
"""

from dataclasses import replace

from lowband.predict.time import StepTime, step_time
from lowband.predict.workload import workload_of
from lowband.spec.machine import Device, Link, Machine
from lowband.spec.run import RunSpec


def box_step_s(spec: RunSpec) -> float | None:
    """Seconds of one optimizer step of a run of our engine in a box; None for any other run."""
    if spec.machine.box is None or spec.engine != "lowband":
        return None
    return float(box_step(spec).total) * spec.machine.box.scale


def box_step(spec: RunSpec) -> StepTime:
    """One optimizer step of a run of our engine in a box, at full scale."""
    bared = bare(spec.machine, spec.compute_dtype)
    job = replace(workload_of(spec), machine=bared, attention="plain")
    return step_time(job)


def bare(machine: Machine, dtype: str) -> Machine:
    """The machine at full scale, with only its paced rate and its links' rates."""
    assert machine.box is not None
    device = Device(name=machine.device.name, peak_tflops={dtype: machine.box.tflops}, source="the box's")
    levels = [
        level.model_copy(
            update={"link": Link(gigabytes_per_s=level.link.gigabytes_per_s, source=level.link.source)}
        )
        for level in machine.levels
        if level.link is not None  # a box's levels all have links
    ]
    return machine.model_copy(update={"device": device, "levels": tuple(levels)})
