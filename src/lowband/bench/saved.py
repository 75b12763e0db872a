"""Steps with weights that forwards save looked after (engine/passes/saved_leaves.py), and without, in turns.

Without, tensors are saved as autograd saves them. That is right in these steps, whose weights do not change
before their backward, and shows what the look costs.
"""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import lowband
from lowband.bench.joined import MACHINE, MODEL, TIME_LIMIT_S, stepper
from lowband.bench.turns import by_step, in_turns, timed
from lowband.engine.passes.engine import engine_of
from lowband.model.gpt import GPT, Block
from lowband.run.joining import share_one_heap
from lowband.run.on_ranks import on_ranks
from lowband.spec.config import Config
from lowband.spec.model import ModelSpec
from lowband.spec.scheme import Scheme

LOOKED_AFTER, UNSEEN = "looked after", "as autograd saves them"
SCHEMES, RANKS = ("ddp", "zero3"), (1, 2, 4)
WARMUP, STEPS = 2, 60


class Step(NamedTuple):
    """step_s: of the slowest rank; cpu_s: processor time of a rank, in the mean"""

    ranks: int
    scheme: str
    weights: str
    step: int
    step_s: float
    cpu_s: float


def bench(root: Path) -> list[Step]:
    """STEPS steps of both, for each scheme and number of RANKS."""
    config, rows = Config(root), []
    sizes, spec = config.machine(MACHINE).sizes, config.model(MODEL)
    for ranks in RANKS:
        for name in SCHEMES:
            given = sizes, config.scheme(name), spec
            for weights, step, times in by_step(on_ranks(ranks, _train, *given, time_limit_s=TIME_LIMIT_S)):
                walls, used = zip(*times, strict=True)
                rows.append(Step(ranks, name, weights, step, max(walls), sum(used) / ranks))
    return rows


def _train(sizes: dict[str, int], scheme: Scheme, spec: ModelSpec) -> dict[str, list[tuple[float, float]]]:
    """Of each, this rank's seconds and processor seconds of each step after WARMUP."""
    share_one_heap()
    ways = {}
    for weights in (LOOKED_AFTER, UNSEEN):
        model = _sharded(weights, spec, lowband.Topology(sizes), scheme)
        ways[weights] = timed(stepper(model, spec))
    return in_turns(ways, WARMUP, STEPS)


def _sharded(weights: str, spec: ModelSpec, topology: lowband.Topology, scheme: Scheme) -> nn.Module:
    model = lowband.shard(GPT(spec, seed=1), scheme, topology, Block, torch.float32)
    if weights == UNSEEN:
        engine_of(model)._hooks._saved.enter = lambda _owner: None  # type: ignore[method-assign]
    return model
