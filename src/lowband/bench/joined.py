"""Steps under `ddp` and `zero3`: ours hop by hop and with joined hops, DDP's and FSDP2's, in turns.

Each engine trains its own copy in the same processes. Each block is a unit; under `ddp` ours also trains the
model as one unit, which shows what units themselves cost. Peak memory is that of ranks that train by one
engine alone.
"""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import lowband
from lowband.bench.turns import by_step, in_turns, timed
from lowband.model.gpt import GPT, Block
from lowband.run.clock import peak_memory_bytes
from lowband.run.joining import share_one_heap
from lowband.run.on_ranks import on_ranks
from lowband.spec.config import Config
from lowband.spec.model import ModelSpec
from lowband.spec.scheme import Scheme

MACHINE, MODEL = "local", "gpt-5m"
ONE_UNIT = "joined, one unit"
# By scheme, the peer last.
ENGINES = {"ddp": ("hops", "joined", ONE_UNIT, "DDP"), "zero3": ("hops", "joined", "FSDP2")}
RANKS = (2, 4, 8)
GLOBAL_BATCH, SEQ_LEN = 8, 128
WARMUP, STEPS, STEPS_ALONE = 2, 12, 3
TIME_LIMIT_S = 1800


class Step(NamedTuple):
    """step_s: of the slowest rank; cpu_s: processor time of a rank, in the mean

    held_bytes: peak resident memory over the start, in the mean over ranks; the same in all steps
    """

    ranks: int
    scheme: str
    engine: str
    step: int
    step_s: float
    cpu_s: float
    held_bytes: float


def bench(root: Path) -> list[Step]:
    """STEPS steps of every engine, for each number of RANKS."""
    config, rows = Config(root), []
    sizes, spec = config.machine(MACHINE).sizes, config.model(MODEL)
    for ranks in RANKS:
        for name, engines in ENGINES.items():
            given = engines, sizes, config.scheme(name), spec
            by_rank = on_ranks(ranks, _train, *given, time_limit_s=TIME_LIMIT_S)
            held = {
                engine: sum(on_ranks(ranks, _held_bytes, engine, *given[1:], time_limit_s=TIME_LIMIT_S))
                / ranks
                for engine in engines
            }
            for engine, step, times in by_step(by_rank):
                walls, used = zip(*times, strict=True)
                rows.append(Step(ranks, name, engine, step, max(walls), sum(used) / ranks, held[engine]))
    return rows


def _train(
    engines: tuple[str, ...], sizes: dict[str, int], scheme: Scheme, spec: ModelSpec
) -> dict[str, list[tuple[float, float]]]:
    """Per engine, this rank's seconds and processor seconds of each step after WARMUP."""
    share_one_heap()
    topology = lowband.Topology(sizes)
    models = {name: _prepared(name, GPT(spec, seed=1), topology, scheme) for name in engines}
    return in_turns({name: timed(stepper(model, spec)) for name, model in models.items()}, WARMUP, STEPS)


def _prepared(engine: str, model: GPT, topology: lowband.Topology, scheme: Scheme) -> nn.Module:
    """The model under an engine in fp32, each block one unit, or all of it one unit."""
    if engine == "DDP":
        return DistributedDataParallel(model)
    if engine == "FSDP2":
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)
    if engine == ONE_UNIT:
        return lowband.shard(model, scheme, topology, (), torch.float32, collectives="joined")
    return lowband.shard(model, scheme, topology, Block, torch.float32, collectives=engine)


def _held_bytes(engine: str, sizes: dict[str, int], scheme: Scheme, spec: ModelSpec) -> int:
    """Peak resident memory of this rank, which trains by one engine, over what it was at the start."""
    share_one_heap()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    step = stepper(_prepared(engine, GPT(spec, seed=1), lowband.Topology(sizes), scheme), spec)
    for _ in range(STEPS_ALONE):
        step()
    return peak_memory_bytes(torch.device("cpu")) - pages * resource.getpagesize()


def stepper(model: nn.Module, spec: ModelSpec) -> Callable[[], None]:
    """One step on this rank's part of the batch."""
    random = torch.Generator().manual_seed(dist.get_rank())
    shape = GLOBAL_BATCH // dist.get_world_size(), SEQ_LEN
    tokens = torch.randint(spec.vocab, shape, generator=random)
    adamw = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step() -> None:
        model(tokens, tokens).backward()
        adamw.step()
        adamw.zero_grad()

    return step
