"""Time that a run in a scale model (docs/scale-model.md) should take, by the rates of its box alone.

Matrix products run at the paced rate, links at their stated rates, collectives as the engine sends them, hop
by hop or flat; nothing else takes time, nothing is fitted, and all is multiplied by the scale. All schemes
therefore have equal forward and backward computation and differ only in exposed communication.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lowband.predict.search.lengths_cost import Job
from lowband.predict.search.lengths_step import Costs
from lowband.predict.time import StepTime, step_time
from lowband.predict.workload import workload_of
from lowband.spec.machine import Device, Link, Machine
from lowband.spec.model import ModelSpec
from lowband.spec.run import RunSpec
from lowband.spec.stack import OURS


def box_step_s(spec: RunSpec) -> float | None:
    """Seconds of one optimizer step of a run of our engine in a box; None for any other run."""
    if spec.machine.box is None or spec.engine != "lowband":
        return None
    return float(box_step(spec).total) * spec.machine.box.scale


def box_step(spec: RunSpec) -> StepTime:
    """One optimizer step of a run of our engine in a box, at full scale."""
    bared = bare(spec.machine, spec.compute_dtype)
    job = workload_of(spec)
    job = replace(job, machine=bared, stack=job.stack.with_options({"attention": "plain"}))
    return step_time(job)


def box_costs(machine: Machine, model: ModelSpec, ranks: int, room: float) -> Costs:
    """What sequences of many lengths cost in a box, in its own seconds. room: tokens on a rank"""
    assert machine.box is not None
    scale = machine.box.scale
    found = Job(
        bare(machine, "bf16"), OURS.with_options({"attention": "plain"}), model, ranks, "none"
    ).costs()

    def slowed(degree: int) -> Callable[[NDArray[np.int64]], NDArray[np.float64]]:
        return lambda lengths: scale * found.seconds[degree](lengths)

    return replace(
        found, seconds={degree: slowed(degree) for degree in found.seconds}, room=room, fixed_s=0.0
    )


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
