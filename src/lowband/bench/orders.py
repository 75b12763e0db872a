"""Processor time of a step in depth-first and in breadth-first order, in turns, on this machine."""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

import lowband
from lowband.bench.turns import by_step, in_turns, timed
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.config import Config
from lowband.spec.model import ModelSpec
from lowband.spec.scheme import Scheme

MACHINE, MODEL, SCHEME = "local", "gpt-5m", "zero3"
RANKS = 4
PASSES = (4, 8)
SEQUENCES, SEQ_LEN = 2, 128  # per rank and pass
WARMUP, STEPS = 1, 5
TIME_LIMIT_S = 600


class Step(NamedTuple):
    """cpu_s: processor time of one step without the optimizer, mean over ranks"""

    ranks: int
    passes: int
    order: str
    step: int
    cpu_s: float


def bench(root: Path) -> list[Step]:
    """Steps in both orders, for each number of PASSES."""
    config = Config(root)
    sizes, scheme, spec = config.machine(MACHINE).sizes, config.scheme(SCHEME), config.model(MODEL)
    rows = []
    for passes in PASSES:
        by_rank = on_ranks(RANKS, _train, sizes, scheme, spec, passes, time_limit_s=TIME_LIMIT_S)
        for order, step, times in by_step(by_rank):
            rows.append(Step(RANKS, passes, order, step, sum(used for _, used in times) / RANKS))
    return rows


def _train(
    sizes: dict[str, int], scheme: Scheme, spec: ModelSpec, passes: int
) -> dict[str, list[tuple[float, float]]]:
    """Per order, this rank's seconds and processor seconds of each step after WARMUP."""
    with torch.device("meta"):
        model = GPT(spec)
    lowband.shard(model, scheme, lowband.Topology(sizes), Block, torch.float32, init=model.init, seed=1)
    random = torch.Generator().manual_seed(1)
    batches = [torch.randint(spec.vocab, (SEQUENCES, SEQ_LEN), generator=random) for _ in range(passes)]
    return in_turns(
        {order: timed(partial(_step, model, batches, order)) for order in ("depth", "breadth")}, WARMUP, STEPS
    )


def _step(model: nn.Module, batches: list[torch.Tensor], order: str) -> None:
    model.zero_grad()
    if order == "breadth":
        lowband.accumulate(model, batches, lambda tokens: model(tokens, tokens) / len(batches))
        return
    for tokens in batches[:-1]:
        with lowband.no_sync(model):
            (model(tokens, tokens) / len(batches)).backward()
    (model(batches[-1], batches[-1]) / len(batches)).backward()
