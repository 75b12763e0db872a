"""Steps with Muon and Shampoo on whole matrices (optimizers.matrices) and with AdamW on shards, in turns.

Shampoo, of the package pytorch-optimizer, computes the roots of its statistics anew in every step: the most
it can cost.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from pytorch_optimizer import ScalableShampoo
from torch import nn

import lowband
from lowband.bench.turns import by_step, in_turns
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.config import Config
from lowband.spec.model import ModelSpec
from lowband.spec.scheme import Scheme

MACHINE, MODEL, SCHEME = "local", "gpt-5m", "zero3"
RANKS = (4, 8)
SEQUENCES, SEQ_LEN = 8, 128  # per rank
WARMUP, STEPS = 1, 4
TIME_LIMIT_S = 900


class Step(NamedTuple):
    """One step, of the slowest rank.

    passes_s:   forward and backward
    exchange_s: gradients to the owners and new values back; 0 for AdamW
    update_s:   in the optimizers
    """

    ranks: int
    tokens_per_rank: int
    optimizer: str
    step: int
    passes_s: float
    exchange_s: float
    update_s: float


def bench(root: Path) -> list[Step]:
    """Steps of every optimizer, for each of RANKS."""
    config = Config(root)
    sizes, scheme, spec = config.machine(MACHINE).sizes, config.scheme(SCHEME), config.model(MODEL)
    rows = []
    for ranks in RANKS:
        by_rank = on_ranks(ranks, _train, sizes, scheme, spec, time_limit_s=TIME_LIMIT_S)
        for optimizer, step, times in by_step(by_rank):
            slowest = [max(each) for each in zip(*times, strict=True)]
            rows.append(Step(ranks, SEQUENCES * SEQ_LEN, optimizer, step, *slowest))
    return rows


def _train(sizes: dict[str, int], scheme: Scheme, spec: ModelSpec) -> dict[str, list[tuple[float, ...]]]:
    """Per optimizer, the times of each step after WARMUP on this rank: passes, exchange, update."""
    topology = lowband.Topology(sizes)
    tokens = torch.randint(spec.vocab, (SEQUENCES, SEQ_LEN), generator=torch.Generator().manual_seed(1))
    ways = {}
    for name, update_of in {"adamw": _adamw, "muon": _muon, "shampoo": _shampoo}.items():
        with torch.device("meta"):
            model = GPT(spec)
        lowband.shard(model, scheme, topology, Block, torch.float32, init=model.init, seed=1)
        ways[name] = partial(_step, model, tokens, update_of(model))
    return in_turns(ways, WARMUP, STEPS)


def _step(
    model: nn.Module, tokens: torch.Tensor, update: Callable[[], tuple[float, float]]
) -> tuple[float, ...]:
    begun = time.perf_counter()
    model(tokens, tokens).backward()
    passes_s = time.perf_counter() - begun
    return passes_s, *update()


def _adamw(model: nn.Module) -> Callable[[], tuple[float, float]]:
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def update() -> tuple[float, float]:
        begun = time.perf_counter()
        adamw.step()
        adamw.zero_grad()
        return 0.0, time.perf_counter() - begun

    return update


def _muon(model: nn.Module) -> Callable[[], tuple[float, float]]:
    matrices = lowband.Matrices(model)
    return _on_matrices(matrices, torch.optim.Muon(matrices.parameters(), lr=0.02))


def _shampoo(model: nn.Module) -> Callable[[], tuple[float, float]]:
    matrices = lowband.Matrices(model, cost=lambda shape: float(sum(side**3 for side in shape)))
    shampoo = ScalableShampoo(
        matrices.parameters(), lr=0.02, start_preconditioning_step=1, preconditioning_compute_steps=1
    )
    return _on_matrices(matrices, shampoo)


def _on_matrices(
    matrices: lowband.Matrices, optimizer: torch.optim.Optimizer
) -> Callable[[], tuple[float, float]]:
    adamw = torch.optim.AdamW(matrices.others(), lr=1e-3)

    def update() -> tuple[float, float]:
        begun = time.perf_counter()
        with matrices:
            arrived = time.perf_counter()
            optimizer.step()
            dist.barrier()  # the slowest owner's update is no part of the way back
            updated = time.perf_counter()
        returned = time.perf_counter()
        adamw.step()
        adamw.zero_grad()
        exchange_s = arrived - begun + returned - updated
        return exchange_s, time.perf_counter() - begun - exchange_s

    return update
