"""Peak memory of a job's micro-batches: below it under any scheme, and under every placement at once.

What passes hold is the same under every placement; what states take is the same however much is recomputed,
and depends on micro-batches only in that there is one of them in a step, or several.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from lowband.cost.activations import Kept, Recompute
from lowband.cost.numbers import GIB, Num, stacked
from lowband.predict.footprint import held_alike, in_mean, items_at, kept_with, of_passes, peak_bytes
from lowband.predict.place import Place, alike, fullest
from lowband.predict.search.floors import ROUNDING, between
from lowband.predict.search.placements import Table
from lowband.predict.tiers import short_by
from lowband.predict.workload import Workload
from lowband.spec.machine import Machine
from lowband.spec.schedules import SCHEDULES

Floats = NDArray[np.float64]


def capacity(machine: Machine) -> float:
    memory_gib = machine.device.memory_gib
    return np.inf if memory_gib is None else memory_gib * GIB


class Peaks:
    """Of the jobs of a search, whose machine, model and stack are the same."""

    def __init__(self) -> None:
        self._kept = dict[object, Kept]()
        self._states = dict[object, dict[str, Num]]()

    def least(self, base: Workload) -> Num:
        """Below the peak of each micro-batch under any scheme: what the runtime has, and activations, if all
        stages were as short as the shortest one. Of uneven ones with split backwards, weight parts need not
        wait while a rank holds most: what waits for them is left out."""
        axes = base.axes
        blocks = axes.chunks * min(axes.layers, default=base.model.layers // axes.stages)
        kept = in_mean(base, self._kept_with(base, base.recompute), self._kept_with(base, "none"))
        if axes.is_uneven and SCHEDULES[axes.row].splits:
            kept = replace(kept, working=0.0)
        held = held_alike(base, blocks, base.micro_batch * base.own_tokens, kept)
        runtime = base.machine.device.framework_gib
        return held * (1 - ROUNDING) + (0 if runtime is None else runtime.value * GIB)

    def under(self, base: Workload, of_base: Table) -> tuple[Floats, Floats]:
        """By scheme and micro-batch, the peak and by how much memory is too small."""
        if base.axes.is_uneven:
            found = [self._at(one, fullest(one), of_base) for one in base.points()[1]]
        else:
            found = [self._at(base, [alike(base)], of_base)]
        peak, short = (np.hstack(each)[of_base.of_states] for each in zip(*found, strict=True))
        return peak, short

    def _at(self, job: Workload, places: Sequence[Place], of_base: Table) -> tuple[Floats, Floats]:
        """The same by placement of states, of the place that needs most."""
        peak, short = np.zeros((2, len(of_base.states), np.size(job.micro_batch)))
        for place in places:
            items = of_passes(job, place) | self._of_states(job, place, of_base)
            here = peak_bytes(items, job.keeps_grads)
            too_many = np.maximum(short_by(job, items), here - capacity(job.machine))
            short = np.where(here > peak, too_many, short)
            peak = np.maximum(here, peak)
        return peak, short

    def _of_states(self, job: Workload, place: Place, of_base: Table) -> dict[str, Num]:
        """What does not depend on what passes hold, by placement of states."""
        several = np.asarray(job.accumulation) > 1
        more = self._with(2, job, place, of_base)
        once = more if several.all() else self._with(1, job, place, of_base)
        return {kind: np.where(several, more[kind], once.get(kind, 0)) for kind in more}

    def _with(self, accumulation: int, job: Workload, place: Place, of_base: Table) -> dict[str, Num]:
        here = place.numels, place.experts, place.gathered, place.summed
        key = accumulation, of_base, here, job.order, job.levels_alike, job.axes.tensor, job.axes.expert
        if key not in self._states:
            one = job.varied(accumulation=accumulation)
            found = [items_at(one.varied(scheme=scheme), place, {}) for scheme in of_base.states]
            self._states[key] = stacked((len(found), 1), found)
        return self._states[key]

    def _kept_with(self, base: Workload, recompute: Recompute) -> Kept:
        key = between(base.axes), recompute
        if key not in self._kept:
            self._kept[key] = kept_with(base, recompute)
        return self._kept[key]
