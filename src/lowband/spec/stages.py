"""How many blocks of our GPT each stage of a pipeline has, and which modules; how often a list comes to each
stage, and which stages have sums of gradients when.
"""

from collections.abc import Sequence
from itertools import accumulate, groupby

from lowband.errors import UserError
from lowband.spec.model import ModelSpec
from lowband.spec.schedule import Action


def blocks_of(model: ModelSpec, stages: int, layers: Sequence[int] = ()) -> tuple[int, ...]:
    """By stage, how many of a model's blocks it has.

    layers: these numbers; none: equally many
    Raises UserError for layers that are not one number of 1 or more a stage with the model's as their sum,
    and for a model that is not divided equally.
    """
    allowed = f"layers: {stages} numbers of 1 or more whose sum is {model.layers}"
    if layers:
        if len(layers) != stages or min(layers) < 1 or sum(layers) != model.layers:
            what = f"layers {list(layers)} for {stages} stages of {model.layers} layers"
            raise UserError(what, where=f"model '{model.name}'", allowed=allowed)
        return tuple(layers)
    if model.layers % stages:
        what = f"{model.layers} layers cannot be divided over {stages} stages"
        if model.layers < stages:
            allowed = f"at most {model.layers} stages"
        raise UserError(what, where=f"model '{model.name}'", allowed=allowed)
    return (model.layers // stages,) * stages


def first_blocks(blocks: Sequence[int], count: int) -> tuple[int, ...]:
    """Numbers of the first blocks of each stage. count: in all stages together; 0: all blocks

    blocks: of each stage
    Raises UserError for a count that is not equally many of each stage, or of stages of unequal length.
    """
    stages, starts = len(blocks), accumulate(blocks, initial=0)
    if count and len(set(blocks)) > 1:
        raise UserError(f"stages of {list(blocks)} blocks", allowed="stages of equally many")
    if count % stages or count > stages * min(blocks):
        what = f"{count} blocks are not equally many of each of {stages} stages"
        raise UserError(what, allowed=f"multiples of {stages} to {stages * min(blocks)}")
    each = [count // stages or size for size in blocks]
    return tuple(start + i for start, size in zip(starts, each, strict=False) for i in range(size))


def stage_modules(model: ModelSpec, blocks: Sequence[int]) -> list[list[str]]:
    """By stage, the modules of `model.gpt.GPT.chain` by name. blocks: of each stage, as `blocks_of` has them

    The first one has the embeddings, too, the last one the norm and the head.
    """
    starts = [sum(blocks[:stage]) for stage in range(len(blocks))]
    found = [[f"blocks.{start + i}" for i in range(size)] for start, size in zip(starts, blocks, strict=True)]
    found[0] = ["embed", *(["positions"] if model.positions == "learned" else []), *found[0]]
    found[-1] += ["final_norm", "head"]
    return found


def visits(actions: Sequence[Action]) -> dict[int, tuple[int, int]]:
    """By stage, how often a rank's list comes to it, first for a forward and first for a backward.

    So often are its units gathered (engine.parallel.executor). What computes weights' gradients alone needs
    no weights.
    """
    found: dict[int, tuple[int, int]] = {}
    for stage, of_visit in groupby(actions, key=lambda action: action.stage):
        forwards, backwards = found.get(stage, (0, 0))
        first = next((action.kind for action in of_visit if action.kind != "weight"), None)
        found[stage] = forwards + (first == "forward"), backwards + (first in ("backward", "input"))
    return found


def summing(actions: Sequence[Action]) -> list[set[int]]:
    """By action of a rank's list, the stages whose gradients are being summed.

    They are from a stage's first backward until its last weights have their gradients, when they are reduced
    (engine.parallel.executor).
    """
    first = {a.stage: k for k, a in reversed([*enumerate(actions)]) if a.kind in ("input", "backward")}
    last = {a.stage: k for k, a in enumerate(actions) if a.kind in ("weight", "backward")}
    starts, ends = ({k: s for s, k in of_stage.items()} for of_stage in (first, last))
    found, now = list[set[int]](), set[int]()
    for k in range(len(actions)):
        if k in starts:
            now = now | {starts[k]}
        found.append(now)
        if k in ends:
            now = now - {ends[k]}
    return found
