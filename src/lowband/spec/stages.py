"""Which modules of our GPT lie on which stage of a pipeline; how often a list comes to each stage, and which
stages have sums of gradients when.
"""

from collections.abc import Sequence
from itertools import groupby

from lowband.spec.model import ModelSpec
from lowband.spec.schedule import Action


def stage_modules(model: ModelSpec, stages: int) -> list[list[str]]:
    """By stage, the modules of `model.gpt.GPT.chain` by name: equally many blocks on each of them.

    The first one has the embeddings, too, the last one the norm and the head. `stages` divides the layers.
    """
    size = model.layers // stages
    found = [[f"blocks.{i}" for i in range(stage * size, (stage + 1) * size)] for stage in range(stages)]
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
    first = {a.stage: k for k, a in reversed([*enumerate(actions)]) if "input" in a.parts}
    last = {a.stage: k for k, a in enumerate(actions) if "weight" in a.parts}
    return [{s for s in first if first[s] <= k <= last[s]} for k in range(len(actions))]
