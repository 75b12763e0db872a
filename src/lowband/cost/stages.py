"""What the ranks along a pipeline axis send in a step, in closed form: each has other parts of the model.

A rank gathers a stage's units whenever its list comes to the stage (`spec.stages.visits`), and reduces their
gradients once, after it has summed them over the micro-batches. Per micro-batch it sends a stage's output to
the rank that has the next stage, and the gradient of its input back: X each, see cost/contents.py. A head
that is the embedding stays gathered for the whole step, as a root; if it lies on another rank, both have it,
and exchange their shards of its gradient once a step.
"""

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise

from lowband.cost.bytes import sent_bytes
from lowband.cost.memory import state_bytes
from lowband.spec.activations import STAGE_GRAD, STAGE_OUTPUT, TIED_REDUCE
from lowband.spec.partition import UnitLayout
from lowband.spec.run import RunSpec
from lowband.spec.stages import stage_modules, visits
from lowband.spec.tensor import cut_shape, gpt_plan
from lowband.spec.wire import DTYPE_BYTES

Key = tuple[str, str, str]  # level, collective, wire
CHECKSUM_BYTES = 8  # of what two ranks have, sent along


@dataclass(frozen=True)
class Part:
    """What a place along pipeline has.

    units:   elements of each, padding included, the root's first: 0 if there is none
    gathers: of each, how often it is gathered for a forward, and for a backward
    """

    units: tuple[int, ...]
    gathers: tuple[tuple[int, int], ...]


def parts(spec: RunSpec) -> list[Part]:
    """By place along pipeline."""
    modules = stage_modules(spec.model, spec.stages)
    found = []
    for of_rank in spec.lists:
        often = visits(of_rank)
        root = ["embed.weight"] if spec.model.tied_head and {0, spec.stages - 1} & often.keys() else []
        units, gathers = [_numel(spec, root)], [(1, 0)]
        for stage, times in sorted(often.items()):
            for module in modules[stage]:
                if names := [name for name in _names(spec, module) if name not in root]:
                    units.append(_numel(spec, names))
                    gathers.append(times)
        found.append(Part(tuple(units), tuple(gathers)))
    return found


def stages_bytes(spec: RunSpec) -> dict[Key, Fraction]:
    """Bytes of states' collectives and of messages between stages, in the mean over all ranks."""
    counts: Counter[Key] = Counter()
    for part in parts(spec):
        of_place = sent_bytes(
            part.units,
            spec.scheme,
            spec.levels,
            spec.compute_dtype,
            spec.reduce_dtype,
            spec.accumulation,
            is_clipped=True,
            order="breadth",  # gradients are reduced once a step
            gathers=part.gathers,
        )
        counts.update({key: Fraction(sent) for key, sent in of_place.items()})
    counts.update(_messages(spec))
    counts.update(_tied(spec))
    return {key: Fraction(sent) / spec.pipeline for key, sent in counts.items() if sent}


def stages_states(spec: RunSpec) -> dict[str, int]:
    """Peak bytes of each state that lasts, on the rank that holds most of it."""
    of_places = [
        state_bytes(
            part.units,
            spec.scheme,
            spec.levels,
            spec.compute_dtype,
            spec.reduce_dtype,
            spec.accumulation,
            "gloo",
            order="breadth",
        )
        for part in parts(spec)
    ]
    kinds = ("weights", "secondary", "grads", "optim")
    return {kind: max(of_place[kind] for of_place in of_places) for kind in kinds}


def _messages(spec: RunSpec) -> Counter[Key]:
    """What one rank of each place sends to other places, together."""
    place_of = _place_of(spec)
    ranks, levels = spec.mesh.group("pipeline", 0), spec.mesh.levels("pipeline")
    tokens = spec.micro_batch * spec.seq_len // (spec.tensor if spec.sequence_parallel else 1)
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
    shard = _numel(spec, ["embed.weight"]) // spec.levels.size(spec.scheme.optim)
    sent = shard * DTYPE_BYTES["fp32"] + CHECKSUM_BYTES
    return Counter({(levels.common(ranks[first], ranks[last]), TIED_REDUCE.name, "native"): 2 * sent})


def _place_of(spec: RunSpec) -> dict[int, int]:
    """By stage, where it lies along pipeline."""
    return {action.stage: place for place, of_rank in enumerate(spec.lists) for action in of_rank}


def _names(spec: RunSpec, module: str) -> list[str]:
    """Parameters of a module of the chain, as they are named in the model or, of a block, in the block."""
    if module.startswith("blocks."):
        return list(spec.model.block_shapes())
    own = "embed" if module == "head" and spec.model.tied_head else module
    return [name for name in spec.model.root_shapes() if name.startswith(f"{own}.")]


def _numel(spec: RunSpec, names: list[str]) -> int:
    plan, shapes = gpt_plan(spec.model), spec.model.root_shapes() | spec.model.block_shapes()
    cut = [cut_shape(name, shapes[name], plan, spec.tensor) for name in names]
    return UnitLayout.of(cut, spec.levels.world).numel if names else 0
