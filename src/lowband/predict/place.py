"""What a rank along pipeline has of the model, and does, as a step's time and memory depend on it.

Where all stages have equally many blocks, one place stands for all of them: it has the embeddings, as the
first rank does, and computes the head, as the last one does. Of uneven stages each rank has a place of its
own: a step takes as long as at the place where it is longest, and needs memory as where it needs most.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from math import ceil
from typing import Any

from lowband.cost.bytes import expert_numels, stage_numels
from lowband.cost.memory import are_gathered
from lowband.cost.numbers import Num
from lowband.cost.stages import Course, most_summed, parts_of
from lowband.cost.stages_step import listed
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.mesh import Levels
from lowband.spec.model import ModelSpec
from lowband.spec.schedule import Action
from lowband.spec.schedules import Name


@dataclass(frozen=True)
class Place:
    """One rank along pipeline.

    blocks:  of all its stages; last: of the one of them whose gradients are complete last
    numels:  elements of its units, padding included: the root's, of all that is no block, then each block's
    gathers: how often a step gathers a block, for forwards and for backwards, in the mean over them
    gathered, gathered_beside, summed: elements in memory at the most, of a pipeline, as in cost.stages.Part
    experts: elements of a block's unit of experts, padding included, where ranks divide them; else 0
    heads:   1 if it computes the head, else 0
    stages:  of uneven stages, its own; of_stage: blocks of all
    held:    likewise, blocks whose activations it holds, and computes again, at its fullest moments
    """

    blocks: int
    last: int
    numels: tuple[int, ...]
    gathers: tuple[Num, Num]
    gathered: int
    gathered_beside: int
    summed: int
    experts: int = 0
    heads: int = 1
    stages: tuple[int, ...] = ()
    of_stage: tuple[int, ...] = ()
    held: tuple[tuple[int, int], ...] = ()

    @property
    def expert_numels(self) -> tuple[int, ...]:
        """As `numels`, of units of experts; none where ranks do not divide them."""
        return (0, *[self.experts] * self.blocks) if self.experts else ()


def alike(job: Workload) -> Place:
    """The place that stands for all, where stages have equally many blocks."""
    layers, axes, numels = job.model.layers, job.axes, stage_numels(job.model, job.levels, job.axes)
    blocks, experts = layers // axes.pipeline, expert_numels(job.model, job.levels_alike, axes.expert)[-1]
    if not job.is_in_stages:
        return Place(blocks, 1, numels, job.gathers, 0, 0, 0, experts)
    (root, block, *_), last = numels, layers // axes.stages
    many = last + (1 if axes.chunks > 1 else 0)
    gathered, gathered_beside = root + (block + experts) * many, root + block * many
    summed = root + (block + experts) * last * most_summed(axes.row, axes.pipeline, axes.chunks)
    return Place(blocks, last, numels, job.gathers, gathered, gathered_beside, summed, experts)


def places(job: Workload) -> tuple[Place, ...]:
    """Those of uneven stages, in order. job: one point"""
    return _places(job.model, job.levels, job.levels_alike, job.axes, int(job.accumulation))


def unlike(job: Workload) -> list[Place]:
    """Of uneven stages, the places at which a step can be longest: of those that differ in how often they
    gather alone, none gathers as often as another. job: one point"""
    key = job.model, job.levels, job.levels_alike, job.axes, int(job.accumulation)
    return _unlike(*key)


@cache
def _unlike(*key: Any) -> list[Place]:
    found: dict[tuple[int, ...], list[Place]] = {}
    for place in _places(*key):
        but_for_gathers = place.blocks, place.last, place.numels[0], place.heads
        found[but_for_gathers] = _with(place, found.get(but_for_gathers, []), _gathers_as_often)
    return list(chain.from_iterable(found.values()))


def fullest(job: Workload) -> list[Place]:
    """Of uneven stages, the places that can be those with most memory: no other has as much of everything.

    job: one point
    """
    return _fullest(job.model, job.levels, job.levels_alike, job.axes, int(job.accumulation))


@cache
def _fullest(*key: Any) -> list[Place]:
    found = list[Place]()
    for place in sorted(_places(*key), key=lambda one: one.blocks, reverse=True):
        found = _with(place, found, _has_as_much)
    return found


def _with(place: Place, found: list[Place], is_above: Callable[[Place, Place], bool]) -> list[Place]:
    """Places of which none is above another, with one more; of equal ones the first."""
    if any(is_above(other, place) for other in found):
        return found
    return [*(other for other in found if not is_above(place, other)), place]


def _gathers_as_often(one: Place, other: Place) -> bool:
    return all(a >= b for a, b in zip(one.gathers, other.gathers, strict=True))


def _has_as_much(one: Place, other: Place) -> bool:
    names = "blocks", "gathered", "gathered_beside", "summed", "heads"
    more = (getattr(one, name) >= getattr(other, name) for name in names)
    held = all(any(a >= c and b >= d for a, b in one.held) for c, d in other.held)
    return all(more) and one.numels[0] >= other.numels[0] and held


def reused(job: Workload, place: Place) -> int:
    """Blocks, the last of a forward, whose weights stay gathered until they are used again: fewer elements
    than the stack's `reused` come between. These are the head, forward and backward, and all blocks behind
    them, forward, once more where they are recomputed, and backward. Beside adapters none is known to."""
    if job.stack.reused is None or job.is_in_stages or job.lora is not None:
        return 0
    if not are_gathered(job.scheme, job.levels):
        return 0
    head, visits = job.model.vocab * job.model.hidden / job.axes.tensor, 3 if job.again == 1 else 2
    behind = (job.stack.reused.value - 2 * head) / (visits * gathered_block(job, place))
    return min(place.blocks, max(0, ceil(behind)))


def gathered_block(job: Workload, place: Place) -> int:
    """Elements of a block that are gathered, its experts' where they are."""
    return place.numels[-1] + place.experts * are_gathered(job.scheme, job.levels_alike)


@cache
def _places(
    model: ModelSpec, levels: Levels, alike: Levels, axes: Ways, micro_batches: int
) -> tuple[Place, ...]:
    ranks = axes.pipeline
    if micro_batches > 4 * ranks:  # each further round of micro-batches, one per rank, is as the one before
        at = 3 * ranks + 1 + (micro_batches - 1) % ranks
        here, before = (_places(model, levels, alike, axes, each) for each in (at, at - ranks))
        rounds = (micro_batches - at) // ranks
        more = micro_batches if axes.row == "breadth" else at  # breadth-first all of them are held
        return tuple(
            replace(
                a,
                gathers=_further(a.gathers, b.gathers, rounds),
                held=tuple((blocks * more // at, again) for blocks, again in a.held),
            )
            for a, b in zip(here, before, strict=True)
        )
    of_stage, found = axes.blocks(model), []
    courses, held = zip(*_on_ranks(axes.row, ranks, micro_batches, axes.chunks, of_stage), strict=True)
    block = stage_numels(model, levels, axes)[1]
    experts = expert_numels(model, alike, axes.expert)[-1]
    parts = parts_of(model, levels, axes.tensor, of_stage, courses, experts, axes.expert)
    for course, part, moments in zip(courses, parts, held, strict=True):
        often = course.visits
        blocks = sum(of_stage[stage] for stage in often)
        forward, backward = (
            sum(of_stage[stage] * times[kind] for stage, times in often.items()) / blocks for kind in (0, 1)
        )
        numels = (sum(part.units) - blocks * block, *[block] * blocks)
        found.append(
            Place(
                blocks, of_stage[course.last], numels, (forward, backward), part.gathered,
                part.gathered_beside, part.summed, experts, int(len(of_stage) - 1 in often), tuple(often),
                of_stage, moments,
            )
        )  # fmt: skip
    return tuple(found)


@cache  # the same whatever lies along the other axes
def _on_ranks(
    name: Name, ranks: int, micro_batches: int, chunks: int, of_stage: tuple[int, ...]
) -> list[tuple[Course, tuple[tuple[int, int], ...]]]:
    of_ranks = listed(name, ranks, micro_batches, chunks)
    return [(Course.of(actions), _held(actions, of_stage)) for actions in of_ranks]


def _further(here: tuple[Num, Num], before: tuple[Num, Num], rounds: int) -> tuple[Num, Num]:
    return here[0] + rounds * (here[0] - before[0]), here[1] + rounds * (here[1] - before[1])


def _held(actions: Sequence[Action], of_stage: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Blocks with a micro-batch's activations at once, and of them those that are being computed again, at
    the moments when either is more than at any other with as many of the other."""
    held = late = 0  # late: whose weight parts wait
    found = set()
    for kind, stage, _ in actions:
        blocks = of_stage[stage]
        held += blocks if kind == "forward" else 0
        late += blocks if kind == "input" else 0
        found.add((held, late + (kind == "backward")))  # a whole backward recomputes block by block
        held -= blocks if kind in ("backward", "weight") else 0
        late -= blocks if kind == "weight" else 0
    ends = list[tuple[int, int]]()
    for one in sorted(found, reverse=True):  # those before it have at least as many blocks held
        if not ends or one[1] > ends[-1][1]:
            ends.append(one)
    return tuple(reversed(ends))
