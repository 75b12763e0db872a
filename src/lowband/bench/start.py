"""Start-up on this machine, and the rate at which a checkpoint of safetensors is read into shards.

A start: ranks are forked, make their groups, and make a module real that was built on the meta device.
"""

import os
import resource
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn

import lowband
from lowband.cost.groups import process_groups
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.config import Config
from lowband.spec.mesh import Levels

MACHINE, MODEL, SCHEME = "frontier", "gpt-5m", "hier3-exact"
RANKS = (8, 16, 32, 64)
READERS = 4
READ_BYTES = 2**30
REPEATS = 3
TIME_LIMIT_S = 300


class Start(NamedTuple):
    """One start of all ranks.

    groups_made, groups_joined, connections: in closed form (cost/groups.py)
    groups_s:  from the fork until all groups are made, of the slowest rank
    sharded_s: until the module is real and sharded
    cpu_s:     processor time of a rank, mean over ranks
    """

    ranks: int
    repeat: int
    groups_made: int
    groups_joined: int
    connections: int
    groups_s: float
    sharded_s: float
    cpu_s: float


class Read(NamedTuple):
    """One read of the same files, not in memory before. what: file (plain reads), or shard"""

    what: str
    ranks: int
    repeat: int
    bytes: int
    took_s: float
    bytes_per_s: float


def start(root: Path) -> list[Start]:
    """Start MODEL under SCHEME on MACHINE's levels, at each of RANKS, REPEATS times."""
    config = Config(root)
    sizes, scheme, spec = config.machine(MACHINE).sizes, config.scheme(SCHEME), config.model(MODEL)

    def started(forked: float) -> tuple[float, float, float]:
        topology = lowband.Topology(sizes)
        grouped = time.monotonic()
        with torch.device("meta"):
            model = GPT(spec)
        lowband.shard(model, scheme, topology, Block, torch.float32, init=model.init, seed=1)
        sharded = time.monotonic()
        used = resource.getrusage(resource.RUSAGE_SELF)
        return grouped - forked, sharded - forked, used.ru_utime + used.ru_stime

    rows = []
    for repeat in range(1, REPEATS + 1):
        for ranks in RANKS:
            found = on_ranks(ranks, started, time.monotonic(), time_limit_s=TIME_LIMIT_S)
            groups, shards, cpu = zip(*found, strict=True)
            levels = Levels.fit(sizes, ranks)
            closed = process_groups(levels, "gloo")
            rows.append(Start(ranks, repeat, *closed, max(groups), max(shards), sum(cpu) / ranks))
    return rows


def read(folder: Path) -> list[Read]:
    """Read READ_BYTES from a file system: plainly by one process, and as shards under zero3, in turns."""
    path = folder / "model.safetensors"
    layers, width = 16, 4096
    rows = READ_BYTES // 4 // layers // width
    save_file({f"{i}.weight": torch.ones(rows, width) for i in range(layers)}, path)
    scheme = lowband.Scheme(name="zero3", weights="world", grads="world", optim="world")

    def shard() -> float:
        with torch.device("meta"):
            model = nn.Sequential(*[nn.Linear(width, rows, bias=False) for _ in range(layers)])
        topology = lowband.Topology({})
        dist.barrier()
        begun = time.monotonic()
        lowband.shard(model, scheme, topology, nn.Linear, torch.float32, init=lowband.Safetensors(folder))
        dist.barrier()
        return time.monotonic() - begun

    found = []
    for repeat in range(1, REPEATS + 1):
        _forget(path)
        begun = time.monotonic()
        with path.open("rb", buffering=0) as file:
            buffer = bytearray(2**24)
            while file.readinto(buffer):
                pass
        took = time.monotonic() - begun
        found.append(Read("file", 1, repeat, READ_BYTES, took, READ_BYTES / took))
        _forget(path)
        took = max(on_ranks(READERS, shard, time_limit_s=TIME_LIMIT_S))
        found.append(Read("shard", READERS, repeat, READ_BYTES, took, READ_BYTES / took))
    return found


def _forget(path: Path) -> None:
    """Drop a file from the page cache, so that it is read from the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
