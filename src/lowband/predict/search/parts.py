"""Which of a job's units have their optimizer's states beyond the device, and which of these come to it for
their update: the fastest choice that fits, by the model of a step's time and memory.

All choices that a scheme can say (spec/offload.py) are worked out at once, as a grid: of c units beyond the
device every k-th is updated on it. So none that fits is faster than what is chosen: neither all states on the
device, where they have room, nor all on the host, nor any stride. Those that move the same are one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowband.cost.bytes import stage_numels
from lowband.cost.memory import largest_two
from lowband.cost.numbers import GIB
from lowband.cost.tiers import Beyond
from lowband.predict.footprint import memory_items, peak_bytes
from lowband.predict.room import surely
from lowband.predict.search.software import OURS, SOFTWARE, Software
from lowband.predict.tiers import short_by
from lowband.predict.time import step_time
from lowband.predict.workload import Workload
from lowband.spec.offload import Offload

Floats = NDArray[np.float64]
NONE, ALL = 0, 1  # of the choices, the first two: no unit beyond the device, and each, updated there


@dataclass(frozen=True)
class Chosen:
    """Of one of a job's micro-batches. beyond: None: all states are on the device; others as a Candidate's"""

    beyond: Beyond | None
    micro_batch: int
    accumulation: int
    step_time_s: float
    short_by: float
    peak: float


@dataclass(frozen=True, eq=False)
class Choices:
    """By choice, how many units are beyond the device, every how-many-th of them comes to it, which share and
    mean stride that is of the parameters, and elements of those that stay and that come, as Beyond's."""

    counts: list[int]
    every: list[int]
    share: Floats
    stride: Floats
    staying: Floats
    coming: Floats


def are_free(job: Workload) -> bool:
    """Whether units can be chosen: where our engine has them apart, and neither is given."""
    beyond, axes = job.beyond, job.axes
    if beyond is None or beyond.optim is None or beyond.weights is not None or job.scheme.tiers:
        return False
    is_whole = beyond.offload is None and np.ndim(beyond.share) == 0 and beyond == Beyond(beyond.optim)
    return is_whole and axes.stages == axes.expert == 1


def by_units(job: Workload, software: Sequence[Software] = ()) -> Workload:
    """The job with given parts of the states as a scheme of our engine has them, by whole units, where some
    of the software is ours and has units apart. Another program's parts are what is given."""
    beyond = job.beyond
    if beyond is None or beyond.optim is None or beyond.weights is not None or job.scheme.tiers:
        return job
    is_whole = beyond.offload is not None or (beyond.share, beyond.stride) == (1, 0)
    is_ours = not software or OURS in software
    if is_whole or not is_ours or job.axes.stages > 1 or job.axes.expert > 1:
        return job
    offload = Offload(share=float(beyond.share), stride=int(beyond.stride))
    return job.varied(beyond=Beyond(beyond.optim, offload=offload))


def chosen_parts(job: Workload, software: Sequence[Software] = ()) -> list[Chosen]:
    """Of each micro-batch the fastest choice that fits, and if that may not fit, the fastest that surely
    does; if none fits, that which is least short of memory. Of equally fast ones that with the lowest peak.

    job: with all of the optimizer's states beyond the device, and its micro-batches as an array, or one
    software: of which one must run what is chosen; none: of all that we know
    """
    assert job.beyond is not None
    choices = choices_of(stage_numels(job.model, job.levels, job.axes))
    batches, many = (np.ravel(each) for each in np.broadcast_arrays(job.micro_batch, job.accumulation))
    times, peaks, shorts = _grid(job, choices, batches, many)
    allowed = _allowed(job, choices, software)
    times = np.where(allowed, times, np.inf)
    room = job.machine.device.memory_gib
    sure = np.asarray(surely(job.machine, peaks) <= (np.inf if room is None else room * GIB))
    found = []
    for i, (micro_batch, accumulation) in enumerate(zip(batches, many, strict=True)):
        fits = (shorts[i] == 0) & allowed
        if fits.any():
            taken = [_first(fits, times[i], peaks[i])]
            if not sure[i, taken[0]] and (fits & sure[i]).any():
                taken.append(_first(fits & sure[i], times[i], peaks[i]))
        else:
            taken = [_first(allowed, shorts[i], times[i])]
        for at in taken:
            numbers = (float(of[i, at]) for of in (times, shorts, peaks))
            beyond = _written(job, choices, at)
            found.append(Chosen(beyond, int(micro_batch), int(accumulation), *numbers))
    return found


def _grid(
    job: Workload, choices: Choices, batches: NDArray[Any], many: NDArray[Any]
) -> tuple[Floats, Floats, Floats]:
    """Seconds, peak bytes, and bytes by which memory is short, by micro-batch and choice."""
    each = job.varied(micro_batch=batches[:, None], accumulation=many[:, None])
    names = "share", "stride", "staying", "coming"
    of_units = {name: getattr(choices, name)[ALL:] for name in names}
    beyond = replace(job.beyond or Beyond(), **of_units)
    parts = []
    for one in (each.varied(beyond=None), each.varied(beyond=beyond)):
        items = memory_items(one)
        peak = peak_bytes(items, one.keeps_grads)
        room = one.machine.device.memory_gib
        short = np.maximum(short_by(one, items), 0 if room is None else peak - room * GIB)
        size = 1 if one.beyond is None else choices.share.size - ALL
        found = (step_time(one).total, peak, short)
        parts.append([np.broadcast_to(value, (batches.size, size)) for value in found])
    time, peak, short = (np.concatenate(columns, axis=1) for columns in zip(*parts, strict=True))
    return time, peak, short


def _first(among: NDArray[np.bool_], *by: Floats) -> int:
    """The least by the first, of equal ones by the next, and so on; always the same."""
    places = np.flatnonzero(among)
    return int(places[np.lexsort([values[places] for values in reversed(by)])[0]])


def _allowed(job: Workload, choices: Choices, software: Sequence[Software]) -> NDArray[np.bool_]:
    """Which of the choices some software runs; the given one is, whoever runs it."""
    beyond = job.beyond or Beyond()
    rows = [row for row in software or SOFTWARE if row.computes(job) and row.places(job.scheme, job)]

    def runs(share: float, stride: int) -> bool:
        placed = replace(beyond, share=share, stride=stride)
        return any(row.offloads(placed, job.scheme, job) for row in rows)

    is_part, is_moved = choices.share < 1, choices.stride > 0
    found = np.zeros(choices.share.size, dtype=bool)
    for part, moved in ((False, True), (True, False), (True, True)):
        found |= runs(0.5 if part else 1.0, 2 if moved else 0) & (is_part == part) & (is_moved == moved)
    found[NONE] = bool(rows) or not software
    found[ALL] = True
    return found


def _written(job: Workload, choices: Choices, at: int) -> Beyond | None:
    """A choice as a scheme has it."""
    if at == NONE or job.beyond is None:
        return None
    if at == ALL:
        return job.beyond
    numels = stage_numels(job.model, job.levels, job.axes)
    share = short_share(numels, choices.counts[at])
    return replace(job.beyond, offload=Offload(share=share, stride=choices.every[at]))


@lru_cache(maxsize=256)
def choices_of(numels: tuple[int, ...]) -> Choices:
    """numels: elements of units, the root's first; of choices that move the same, the shortest stride's"""
    turned = numels[::-1]
    total, held = sum(numels), [0, *accumulate(turned)]
    found: dict[tuple[int, int], int] = {(0, 0): 0, (len(numels), 0): 0}
    for count in range(1, len(numels) + 1):
        found.setdefault((count, 0), 0)
        for every in range(1, count + 1):
            found.setdefault((count, sum(turned[every - 1 : count : every])), every)
    counts, moved = zip(*found, strict=True)
    there, returns = np.array([held[count] for count in counts], dtype=float), np.array(moved, dtype=float)
    stride = np.divide(there, returns, out=np.zeros(there.size), where=returns > 0)
    strides = list(found.values())
    units = [_units(turned[:count], every) for count, every in zip(counts, strides, strict=True)]
    staying, coming = np.array(units, dtype=float).T
    return Choices(list(counts), strides, there / total, stride, staying, coming)


def _units(there: Sequence[int], every: int) -> tuple[int, int]:
    """Elements of the largest of them that stays there, and of the largest two that come."""
    coming = there[every - 1 :: every] if every else ()
    staying = (numel for i, numel in enumerate(there, start=1) if not every or i % every)
    return max(staying, default=0), largest_two(coming)


def short_share(numels: Sequence[int], count: int) -> float:
    """The share with the fewest digits of which so many units are beyond the device."""
    there, total = sum(numels[len(numels) - count :]), sum(numels)
    if count == len(numels):
        return 1.0
    for digits in range(1, 16):
        share: float = there * 10**digits // total / 10**digits
        places = Offload(share=share).of_units(numels) if share else []
        if len(places) - places.count("device") == count:
            return share
    return there / total
