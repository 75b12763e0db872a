"""Processor time of a pipeline of one stage beside that of its parts: plain modules, and `lowband.shard`.

All ways train the same chain on the same micro-batches, in turns: what else the machine does falls on all of
them alike. On one rank the bare modules are the sum of a step's parts. On two, under zero3, both ways of the
engine gather and reduce; with several micro-batches `lowband.shard` gathers in each, the pipeline once.
"""

import resource
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks
from lowband.spec.axes import Axes

LAYERS, WIDTH, HEADS, SEQUENCES, TOKENS = 6, 256, 4, 4, 128
CASES = ((1, 1), (1, 4), (2, 1), (2, 4))  # ranks along data, micro-batches
STEPS = 9  # after two that are not counted
TIME_LIMIT_S = 600

Pairs = list[tuple[torch.Tensor, torch.Tensor]]


class Overhead(NamedTuple):
    """cpu_s: processor time of a step without the optimizer, mean over ranks"""

    ranks: int
    micro_batches: int
    way: str
    step: int
    cpu_s: float


def overhead() -> list[Overhead]:
    """STEPS steps of each way, for each of CASES."""
    rows = []
    for ranks, many in CASES:
        by_rank = on_ranks(ranks, _train, many, time_limit_s=TIME_LIMIT_S)
        for step in range(STEPS):
            for way in by_rank[0]:
                used = sum(of_rank[way][step] for of_rank in by_rank)
                rows.append(Overhead(ranks, many, way, step + 1, used / ranks))
    return rows


def _train(many: int) -> dict[str, list[float]]:
    """By way, this rank's processor seconds of each step."""
    topology = lowband.Topology({}, Axes(pipeline=1))
    data = topology.along("data")
    random = torch.Generator().manual_seed(data.place)
    x = torch.randn(many, SEQUENCES, TOKENS, WIDTH, generator=random)
    pairs: Pairs = [(each, each) for each in x]
    pipe = lowband.Pipeline(
        _chain(), partial(_loss, many), "zero3", topology, many, "depth", compute_dtype=torch.float32
    )
    ways: dict[str, Callable[[], object]] = {"pipeline": lambda: pipe.step(pairs)}
    models: list[nn.Module] = [pipe]
    if len(data.ranks) == 1:
        models.append(plain := nn.Sequential(*_chain()))
        ways["modules"] = lambda: _accumulate(plain, pairs)
    models.append(sharded := nn.Sequential(*_chain()))
    lowband.shard(sharded, "zero3", lowband.Topology({}), nn.TransformerEncoderLayer, torch.float32)
    ways["shard"] = lambda: _accumulate(sharded, pairs, lowband.no_sync)
    found: dict[str, list[float]] = {way: [] for way in ways}
    for step in range(2 + STEPS):
        for way, call in ways.items():
            for model in models:
                model.zero_grad()
            dist.barrier()
            before = _processor_s()
            call()
            if step >= 2:
                found[way].append(_processor_s() - before)
    return found


def _chain() -> list[nn.Module]:
    layer = partial(
        nn.TransformerEncoderLayer, WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True
    )
    torch.manual_seed(1)
    return [layer() for _ in range(LAYERS)]


def _loss(many: int, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean() / many


def _accumulate(model: nn.Module, pairs: Pairs, not_last: Callable[[nn.Module], Any] = nullcontext) -> None:
    """A step of depth-first accumulation. not_last: around all micro-batches but the last"""
    for x, target in pairs[:-1]:
        with not_last(model):
            _loss(len(pairs), model(x), target).backward()
    _loss(len(pairs), model(pairs[-1][0]), pairs[-1][1]).backward()


def _processor_s() -> float:
    """Of all threads of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
