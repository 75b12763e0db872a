"""Peak memory of a job's micro-batches: below it under any scheme, and under every placement at once.

What passes hold is the same under every placement; what states take is the same however much is recomputed,
and depends on micro-batches only in that there is one of them in a step, or several.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowband.cost.activations import Kept
from lowband.cost.bytes import expert_numels, stage_numels
from lowband.cost.numbers import GIB, Num, stacked
from lowband.predict.footprint import (
    FILLED,
    held_alike,
    in_mean,
    items_at,
    kept_with,
    most_held,
    of_passes,
    peak_bytes,
)
from lowband.predict.place import Place, alike, fullest
from lowband.predict.search.floors import ROUNDING, between, by_rank
from lowband.predict.search.placements import Table
from lowband.predict.tiers import short_by
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.machine import Machine
from lowband.spec.schedules import SCHEDULES, Name
from lowband.spec.step import Recompute

Floats = NDArray[np.float64]


def capacity(machine: Machine) -> float:
    memory_gib = machine.device.memory_gib
    return np.inf if memory_gib is None else memory_gib * GIB


class Peaks:
    """Of the jobs of a search, whose machine, but for groups of nodes, model and stack are the same."""

    def __init__(self) -> None:
        self._kept = dict[object, Kept]()
        self._states = dict[object, dict[str, Num]]()

    def least(self, base: Workload) -> Num:
        """Below the peak of each micro-batch under any scheme: what the runtime has, and activations."""
        runtime = base.machine.device.framework_gib
        held: Num = np.max(self._held(base), axis=0)
        return held + (0 if runtime is None else runtime.value * GIB)

    def _held(self, base: Workload) -> Floats:
        """Bytes that activations take at least, by rank of uneven stages, else of the one that holds most."""
        kept = self._kept_of(base)
        tokens = base.micro_batch * base.own_tokens * (1 - ROUNDING)
        if base.axes.is_uneven:
            return np.asarray(tokens * _held_by_ranks(base, kept))
        return np.asarray(held_alike(base, base.model.layers // base.axes.pipeline, tokens, kept))[None]

    def least_under(self, base: Workload, of_base: Table) -> Floats:
        """Of uneven stages, below `under`'s peaks, for a small part of their time: of the rank with most
        together, states and sums of its blocks alone, and the least activations."""
        held, blocks = self._held(base), np.array(_blocks(base.axes))
        least: Floats = np.zeros(1)
        for count in np.unique(blocks):
            place = _of_blocks(base, int(count))
            items = self._of_states(base, place, of_base)
            grads = np.maximum(items["grads"], _summed_at_least(base, place))
            at_loss = held[blocks == count].max(axis=0) + np.where(base.keeps_grads, grads, 0)
            states = sum(items[kind] for kind in ("framework", "weights", "secondary", "optim"))
            least = np.maximum(least, states + np.maximum(grads, at_loss))
        return least[of_base.of_states]

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
        kept = self._kept_of(job)
        for place in places:
            items = of_passes(job, place, kept) | self._of_states(job, place, of_base)
            here = peak_bytes(items, job.keeps_grads)
            too_many = np.maximum(short_by(job, items), here - capacity(job.machine))
            short = np.where(here > peak, too_many, short)
            peak = np.maximum(here, peak)
        return peak, short

    def _of_states(self, job: Workload, place: Place, of_base: Table) -> dict[str, Num]:
        """What does not depend on what passes hold, by placement of states."""
        several = job.sums_grads
        more = self._with(2, job, place, of_base)
        once = more if several.all() else self._with(1, job, place, of_base)
        return {kind: np.where(several, more[kind], once.get(kind, 0)) for kind in more}

    def _with(self, accumulation: int, job: Workload, place: Place, of_base: Table) -> dict[str, Num]:
        here = place.numels, place.experts, place.gathered, place.gathered_beside, place.summed
        key = accumulation, of_base, here, job.order, job.levels_alike, job.axes.tensor, job.axes.expert
        if key not in self._states:
            one = job.varied(accumulation=accumulation)
            found = [items_at(one.varied(scheme=scheme), place, {}) for scheme in of_base.states]
            self._states[key] = stacked((len(found), 1), found)
        return self._states[key]

    def _kept_of(self, base: Workload) -> Kept:
        return in_mean(base, self._kept_with(base, base.recompute), self._kept_with(base, "none"))

    def _kept_with(self, base: Workload, recompute: Recompute) -> Kept:
        key = between(base.axes), recompute
        if key not in self._kept:
            self._kept[key] = kept_with(base, recompute)
        return self._kept[key]


def _of_blocks(base: Workload, blocks: int) -> Place:
    """A rank of uneven stages with so many blocks and nothing else."""
    block = stage_numels(base.model, base.levels, base.axes)[1]
    experts = expert_numels(base.model, base.levels_alike, base.axes.expert)[-1]
    return Place(blocks, 1, (0, *[block] * blocks), (0, 0), 0, 0, 0, experts)


def _held_by_ranks(base: Workload, kept: Kept) -> Floats:
    """Of uneven stages, by rank and micro-batch, bytes for each token that it holds at least: if all of its
    stages were as short as its shortest one. What waits for its weight part is held, too, when most of it
    waits; where backwards are whole, one block is computed again when most is held."""
    axes, many = base.axes, np.asarray(base.accumulation)
    filled = FILLED * axes.pipeline
    of_each = [
        _in_shortest(axes.row, axes.pipeline, axes.chunks, axes.layers, int(count))
        for count in np.minimum(many, filled)
    ]
    held, late = np.stack(of_each, axis=-1)
    if axes.row == "breadth":  # all of them are held
        held = held * np.maximum(many / filled, 1)
    of_blocks: Floats = held * kept.block
    if SCHEDULES[axes.row].splits:
        return np.asarray(np.maximum(of_blocks, late * (kept.block + kept.working)))
    return np.asarray(of_blocks + kept.working)


def _fills(base: Workload) -> Any:
    """Whether lists hold at least as much at once as those of FILLED micro-batches for each rank."""
    return np.asarray(base.accumulation) >= FILLED * base.axes.pipeline


@cache  # the same whatever lies along the other axes, and however much is recomputed
def _in_shortest(row: Name, ranks: int, chunks: int, layers: tuple[int, ...], many: int) -> Floats:
    """By rank of uneven stages, the most blocks of micro-batches that it holds, and whose weight parts wait,
    if all of its stages were as short as the shortest of them. many: micro-batches of a step"""
    shortest = [chunks * min(own) for own in by_rank(row, ranks, layers)]
    found: Floats = np.transpose(most_held(row, ranks, chunks, many)) * np.array(shortest)
    return found


def _blocks(axes: Ways) -> list[int]:
    """By rank of uneven stages, its blocks."""
    return [sum(own) for own in by_rank(axes.row, axes.pipeline, axes.layers)]


def _summed_at_least(base: Workload, place: Place) -> Num:
    """Bytes of gradients that a rank with a place's blocks sums at once: of its longest stage, and of all of
    them where micro-batches fill the pipeline, but breadth-first."""
    axes, many, block = base.axes, np.asarray(base.accumulation), place.numels[-1] + place.experts
    of_stage = -(-place.blocks // axes.chunks)
    blocks = np.where(_fills(base) & (axes.row != "breadth"), place.blocks, of_stage)
    return np.where(many > 1, base.stack.summed_bytes * block * blocks, 0)
