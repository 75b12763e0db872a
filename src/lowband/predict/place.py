"""What a rank along pipeline has of the model, and does, as a step's time and memory depend on it.

Where all stages have equally many blocks, one place stands for all of them: it has the embeddings, as the
first rank does, and computes the head, as the last one does. Of uneven stages each rank has a place of its
own: a step takes as long as at the place where it is longest, and needs memory as where it needs most.
"""

from dataclasses import dataclass
from functools import cache

from lowband.cost.bytes import expert_numels, stage_numels
from lowband.cost.numbers import Num
from lowband.cost.stages import most_summed, parts_of
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.mesh import Levels
from lowband.spec.model import ModelSpec
from lowband.spec.schedule import Action
from lowband.spec.schedules import lists
from lowband.spec.stages import visits


@dataclass(frozen=True)
class Place:
    """One rank along pipeline.

    blocks:  of all its stages; last: of the one of them whose gradients are complete last
    numels:  elements of its units, padding included: the root's, of all that is no block, then each block's
    gathers: how often a step gathers a block, for forwards and for backwards, in the mean over them
    gathered, summed: elements in memory at the most, of a pipeline, as in cost.stages.Part
    experts: elements of a block's unit of experts, padding included, where ranks divide them; else 0
    heads:   1 if it computes the head, else 0
    actions: of uneven stages, its list; of_stage: their blocks
    """

    blocks: int
    last: int
    numels: tuple[int, ...]
    gathers: tuple[Num, Num]
    gathered: int
    summed: int
    experts: int = 0
    heads: int = 1
    actions: tuple[Action, ...] = ()
    of_stage: tuple[int, ...] = ()

    @property
    def expert_numels(self) -> tuple[int, ...]:
        """As `numels`, of units of experts; none where ranks do not divide them."""
        return (0, *[self.experts] * self.blocks) if self.experts else ()


def alike(job: Workload) -> Place:
    """The place that stands for all, where stages have equally many blocks."""
    layers, axes, numels = job.model.layers, job.axes, stage_numels(job.model, job.levels, job.axes)
    blocks, experts = layers // axes.pipeline, expert_numels(job.model, job.levels_alike, axes.expert)[-1]
    if not job.is_in_stages:
        return Place(blocks, 1, numels, job.gathers, gathered=0, summed=0, experts=experts)
    (root, block, *_), last = numels, layers // axes.stages
    block += experts
    gathered = root + block * (last + (1 if axes.chunks > 1 else 0))
    summed = root + block * last * most_summed(axes.row, axes.pipeline, axes.chunks)
    return Place(blocks, last, numels, job.gathers, gathered, summed, experts)


def places(job: Workload) -> tuple[Place, ...]:
    """Those of uneven stages, in order. job: one point"""
    return _places(job.model, job.levels, job.levels_alike, job.axes, int(job.accumulation))


@cache
def _places(
    model: ModelSpec, levels: Levels, alike: Levels, axes: Ways, micro_batches: int
) -> tuple[Place, ...]:
    of_stage, found = axes.blocks(model), []
    of_ranks = lists(axes.row, axes.pipeline, micro_batches, axes.chunks)
    block = stage_numels(model, levels, axes)[1]
    experts = expert_numels(model, alike, axes.expert)[-1]
    parts = parts_of(model, levels, axes.tensor, of_stage, of_ranks, experts, axes.expert)
    for actions, part in zip(of_ranks, parts, strict=True):
        often = visits(actions)
        blocks = sum(of_stage[stage] for stage in often)
        forward, backward = (
            sum(of_stage[stage] * times[kind] for stage, times in often.items()) / blocks for kind in (0, 1)
        )
        numels = (sum(part.units) - blocks * block, *[block] * blocks)
        found.append(
            Place(
                blocks, of_stage[actions[-1].stage], numels, (forward, backward), part.gathered, part.summed,
                experts, int(len(of_stage) - 1 in often), tuple(actions), of_stage,
            )
        )  # fmt: skip
    return tuple(found)
