"""What the ranks along a pipeline axis send in a step, in closed form: each has other parts of the model.

A rank gathers a stage's units whenever its list comes to the stage (`spec.stages.visits`), and reduces their
gradients once, after it has summed them over the micro-batches. Per micro-batch it sends a stage's output to
the rank that has the next stage, and the gradient of its input back: X each, see cost/contents.py. A head
that is the embedding stays gathered for the whole step, as a root; if it lies on another rank, both have it,
and exchange their shards of its gradient once a step.

So a rank holds a stage's gathered weights whole, and beside them the first unit of the stage that is next in
its list; and the sums of gradients of all stages that are between their first backward and their last.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import groupby, pairwise

import numpy as np

from lowband.cost.bytes import expert_numels, experts_apart, sent_bytes
from lowband.cost.memory import GRAD_BYTES, are_gathered, state_bytes
from lowband.cost.numbers import Num
from lowband.spec.activations import STAGE_GRAD, STAGE_OUTPUT, TIED_REDUCE
from lowband.spec.mesh import Levels
from lowband.spec.model import ModelSpec
from lowband.spec.partition import UnitLayout
from lowband.spec.run import RunSpec
from lowband.spec.schedule import Action
from lowband.spec.schedules import SCHEDULES, Name
from lowband.spec.stages import stage_modules, summing, visits
from lowband.spec.tensor import cut_shape, gpt_plan
from lowband.spec.wire import DTYPE_BYTES

Key = tuple[str, str, str]  # level, collective, wire
CHECKSUM_BYTES = 8  # of what two ranks have, sent along


@dataclass(frozen=True)
class Part:
    """What a place along pipeline has.

    units:   elements of each, padding included, the root's first: 0 if there is none
    gathers: of each, how often it is gathered for a forward, and for a backward
    experts, experts_gathers: the same of units of experts that ranks divide; an empty root's first
    gathered, summed: elements of those that are gathered, and whose gradients are summed, at the most
    gathered_beside: as `gathered`, where experts are whole on their ranks, so that they are not gathered
    """

    units: tuple[int, ...]
    gathers: tuple[tuple[int, int], ...]
    experts: tuple[int, ...]
    experts_gathers: tuple[tuple[int, int], ...]
    gathered: int
    gathered_beside: int
    summed: int


@dataclass(frozen=True)
class Course:
    """What gathers and sums of a rank's units depend on, of its list.

    visits:   by stage, as `spec.stages.visits` has them
    summing:  which stages' gradients are summed at once
    gathered: at the end of a visit, the stage that is gathered or None, and beside it the first unit of the
              next visit: of which stage, 0 or -1, or None
    last:     the stage of its last action
    """

    visits: dict[int, tuple[int, int]]
    summing: frozenset[frozenset[int]]
    gathered: frozenset[tuple[int | None, tuple[int, int] | None]]
    last: int

    @classmethod
    def of(cls, actions: Sequence[Action]) -> "Course":
        gathered, ahead = set[tuple[int | None, tuple[int, int] | None]](), None
        for stage, of_visit in groupby(reversed(actions), key=lambda action: action.stage):
            kinds = [action.kind for action in of_visit]
            gathered.add((None if set(kinds) == {"weight"} else stage, ahead))
            first = kinds[-1]  # of the visit, whose first gather starts in the one before
            ahead = None if first == "weight" else (stage, 0 if first == "forward" else -1)
        found = {id(at_once): at_once for at_once in summing(actions)}  # of most actions the same one
        at_once = frozenset(map(frozenset, found.values()))
        return cls(visits(actions), at_once, frozenset(gathered), actions[-1].stage)


def parts(spec: RunSpec) -> list[Part]:
    """By place along pipeline."""
    of_job = spec.model, spec.levels, spec.tensor, spec.blocks(spec.model), [*map(Course.of, spec.lists)]
    return parts_of(*of_job, expert_numels(spec.model, spec.levels_alike, spec.expert)[-1], spec.expert)


def parts_of(
    model: ModelSpec,
    levels: Levels,
    tensor: int,
    blocks: Sequence[int],
    courses: Sequence[Course],
    of_experts: int = 0,
    expert: int = 1,
) -> list[Part]:
    """The same of any pipeline. levels: along data; blocks: of each stage; courses: by place

    of_experts: elements of a block's unit of experts, where `expert` ranks divide them
    """
    apart = experts_apart(model, expert)
    modules, last = stage_modules(model, blocks), len(blocks) - 1
    known: dict[tuple[str, bool], int] = {}

    def numel(module: str, is_tied: bool) -> int:
        """Of a module but for experts apart and, where it is tied, the embedding, which is in the root."""
        is_block = module.startswith("blocks.")  # blocks are alike
        key = "blocks." if is_block else module, is_tied
        if key not in known:
            names = [*model.block_shapes()] if is_block else _names(model, module)
            out = {*apart, *(["embed.weight"] if is_tied else [])}
            known[key] = _numel(model, levels, tensor, [name for name in names if name not in out])
        return known[key]

    tied = _numel(model, levels, tensor, ["embed.weight"]) if model.tied_head else 0
    found = []
    for course in courses:
        often = course.visits
        is_tied = model.tied_head and bool({0, last} & often.keys())
        whole, without, together = tied if is_tied else 0, dict[int, list[int]](), dict[int, list[int]]()
        numels, gathers, mixed = [whole], [(1, 0)], [(1, 0)]
        for stage, times in sorted(often.items()):
            units = [numel(module, is_tied) for module in modules[stage]]
            beside = [of_experts if module.startswith("blocks.") else 0 for module in modules[stage]]
            without[stage] = units
            together[stage] = [a + b for a, b in zip(units, beside, strict=True)]
            numels += filter(None, units)
            gathers += [times for unit in units if unit]
            mixed += [times for numel in beside if numel]
        gathered, gathered_beside = (whole + _most_gathered(course, each) for each in (together, without))
        summed = whole + max(sum(sum(together[stage]) for stage in at_once) for at_once in course.summing)
        experts = (0, *[of_experts] * (len(mixed) - 1))
        found.append(
            Part(tuple(numels), tuple(gathers), experts, tuple(mixed), gathered, gathered_beside, summed)
        )
    return found


def _most_gathered(course: Course, units: Mapping[int, Sequence[int]]) -> int:
    """Elements, at the end of a visit to a stage. units: of each stage, by module"""
    most = 0
    for stage, ahead in course.gathered:
        here = 0 if stage is None else sum(units[stage])
        most = max(most, here + (0 if ahead is None else units[ahead[0]][ahead[1]]))
    return most


def stages_bytes(spec: RunSpec) -> dict[Key, Fraction]:
    """Bytes of states' collectives and of messages between stages, in the mean over all ranks."""
    counts: Counter[Key] = Counter()
    for part in parts(spec):
        for units, levels, gathers, is_clipped in (
            (part.units, spec.levels, part.gathers, True),
            (part.experts, spec.levels_alike, part.experts_gathers, False),
        ):
            of_place = sent_bytes(
                units,
                spec.scheme,
                levels,
                spec.compute_dtype,
                spec.reduce_dtype,
                spec.accumulation,
                is_clipped,
                order="breadth",  # gradients are reduced once a step
                gathers=gathers,
            )
            counts.update({key: Fraction(sent) for key, sent in of_place.items()})
    counts.update(_messages(spec))
    counts.update(_tied(spec))
    return {key: Fraction(sent) / spec.pipeline for key, sent in counts.items() if sent}


def stages_states(spec: RunSpec) -> dict[str, int]:
    """Peak bytes of each state, on the rank that holds most of it; without those of collectives' buffers."""
    gathers, all_are = (are_gathered(spec.scheme, of) for of in (spec.levels, spec.levels_alike))
    element = DTYPE_BYTES[spec.compute_dtype]
    of_places = [
        {
            **_lasting(spec, part),
            "gathered": element * (part.gathered if all_are else part.gathered_beside) if gathers else 0,
            "sums": GRAD_BYTES * part.summed if spec.accumulation > 1 else 0,
        }
        for part in parts(spec)
    ]
    return {kind: max(of_place[kind] for of_place in of_places) for kind in of_places[0]}


def _lasting(spec: RunSpec, part: Part) -> dict[str, int]:
    of_both = [
        state_bytes(
            units,
            spec.scheme,
            levels,
            spec.compute_dtype,
            spec.reduce_dtype,
            spec.accumulation,
            "gloo",
            order="breadth",
        )
        for units, levels in ((part.units, spec.levels), (part.experts, spec.levels_alike))
        if len(units) > 1
    ]
    return {
        kind: sum(states[kind] for states in of_both)
        for kind in of_both[0]
        if kind.partition("@")[0] in ("weights", "secondary", "grads", "optim")
    }


def gathers(name: Name, ranks: int, micro_batches: Num, chunks: int) -> tuple[Num, Num]:
    """How often a step of a named schedule gathers a unit of the first rank, for forwards and for backwards,
    in the mean over its stages. With one stage it stays gathered.

    micro_batches: may be an array, of whole numbers
    """
    if chunks == 1:
        return 1, 0
    many, places = np.unique(micro_batches, return_inverse=True)
    found = np.array([_counted(name, ranks, int(each), chunks) for each in many])[places] / chunks
    forward, backward = (found[..., i].reshape(np.shape(micro_batches)) for i in (0, 1))
    return forward, backward


@cache
def _counted(name: Name, ranks: int, micro_batches: int, chunks: int) -> tuple[int, int]:
    """Visits to all of the first rank's stages. In the steady part of a list every further round of
    micro-batches, one per rank, adds as many as the last one, if the rounds are alike."""
    if micro_batches > 4 * ranks and (name != "interleaved" or micro_batches % ranks == 0):
        at = 3 * ranks + 1 + (micro_batches - 1) % ranks
        here, before = (_counted(name, ranks, each, chunks) for each in (at, at - ranks))
        further = (micro_batches - at) // ranks
        return here[0] + further * (here[0] - before[0]), here[1] + further * (here[1] - before[1])
    times = visits(SCHEDULES[name].of_rank(0, ranks, micro_batches, chunks)).values()
    return sum(forward for forward, _ in times), sum(backward for _, backward in times)


@cache
def most_summed(name: Name, ranks: int, chunks: int) -> int:
    """Stages of the first rank whose gradients are summed at once, where micro-batches fill the pipeline."""
    return max(map(len, summing(SCHEDULES[name].of_rank(0, ranks, 2 * ranks, chunks))))


def _messages(spec: RunSpec) -> Counter[Key]:
    """What one rank of each place sends to other places, together."""
    place_of = _place_of(spec)
    ranks, levels = spec.mesh.group("pipeline", 0), spec.mesh.levels("pipeline")
    divided = spec.context * (spec.tensor if spec.sequence_parallel else 1)
    tokens = spec.micro_batch * spec.seq_len // divided
    x = DTYPE_BYTES[spec.compute_dtype] * tokens * spec.model.hidden
    counts: Counter[Key] = Counter()
    for stage, following in pairwise(range(spec.stages)):
        here, there = ranks[place_of[stage]], ranks[place_of[following]]
        if here != there:
            for row in (STAGE_OUTPUT, STAGE_GRAD):
                counts[levels.common(here, there), row.name, "native"] += x * spec.accumulation
    return counts


def _tied(spec: RunSpec) -> Counter[Key]:
    """The same of the gradient of a head that is the embedding, with a checksum of the weights."""
    first, last = _place_of(spec)[0], _place_of(spec)[spec.stages - 1]
    if not spec.model.tied_head or first == last:
        return Counter()
    ranks, levels = spec.mesh.group("pipeline", 0), spec.mesh.levels("pipeline")
    embedding = _numel(spec.model, spec.levels, spec.tensor, ["embed.weight"])
    shard = embedding // spec.levels.size(spec.scheme.optim)
    sent = shard * DTYPE_BYTES["fp32"] + CHECKSUM_BYTES
    return Counter({(levels.common(ranks[first], ranks[last]), TIED_REDUCE.name, "native"): 2 * sent})


def _place_of(spec: RunSpec) -> dict[int, int]:
    """By stage, where it lies along pipeline."""
    return {action.stage: place for place, of_rank in enumerate(spec.lists) for action in of_rank}


def _names(model: ModelSpec, module: str) -> list[str]:
    """Parameters of a module of the chain, as they are named in the model or, of a block, in the block."""
    if module.startswith("blocks."):
        return list(model.block_shapes())
    own = "embed" if module == "head" and model.tied_head else module
    return [name for name in model.root_shapes() if name.startswith(f"{own}.")]


def _numel(model: ModelSpec, levels: Levels, tensor: int, names: Sequence[str]) -> int:
    plan, shapes = gpt_plan(model), model.root_shapes() | model.block_shapes()
    cut = [cut_shape(name, shapes[name], plan, tensor) for name in names]
    return UnitLayout.of(cut, levels.world).numel if names else 0
