"""How much of a disk's traffic a step hides: steps with states on a disk beside their parts alone, in turns.

One rank of one thread, as ranks of a CPU are. What a step computes is timed with the states in host memory,
and the traffic as the same files read and written in the same order, without computing.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import lowband
from lowband.bench.turns import in_turns
from lowband.engine.passes.engine import engine_of
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.spec.model import ModelSpec
from lowband.spec.scheme import Scheme
from lowband.spec.step import FETCH
from lowband.spec.tiers import DISK, HOST, Tier, at

MODEL = ModelSpec(
    name="disk", layers=8, hidden=384, heads=6, vocab=256, seq_len=512, positions="rotary", source="ours"
)
TOKENS = (128, 512, 2048)  # of a step, which takes less than its traffic, about as long, and longer
WARMUP, TURNS, IN_A_ROW = 1, 5, 3
TIME_LIMIT_S = 1800


class Step(NamedTuple):
    """Means over steps in a row, of which the last ends with its last write.

    compute_s:   of a step with the states in host memory
    traffic_s:   of reading and writing the states, and nothing else
    together_s:  of a step with the states on the disk
    overlap:     what of the shorter of the two is hidden
    state_bytes: read, and written, by a step
    direct:      whether files went around the page cache
    """

    tokens: int
    turn: int
    compute_s: float
    traffic_s: float
    together_s: float
    overlap: float
    state_bytes: int
    direct: bool


class _Found(NamedTuple):
    state_bytes: int
    direct: bool
    seconds: dict[str, list[float]]  # by way


def bench(folder: Path) -> list[Step]:
    """Steps of each of TOKENS."""
    rows = []
    for tokens in TOKENS:
        [found] = on_ranks(1, _measure, folder / str(tokens), tokens, time_limit_s=TIME_LIMIT_S)
        for turn, (compute_s, traffic_s, together_s) in enumerate(zip(*found.seconds.values(), strict=True), 1):
            hidden_s = compute_s + traffic_s - together_s
            overlap = hidden_s / min(compute_s, traffic_s)
            rows.append(
                Step(tokens, turn, compute_s, traffic_s, together_s, overlap, found.state_bytes, found.direct)
            )
    return rows


class _Trained:
    """A model with its states in a tier."""

    def __init__(self, tier: Tier, folder: Path | None, tokens: int) -> None:
        scheme = Scheme(name=tier, weights="world", grads="world", optim=at("world", tier))
        with torch.device("meta"):
            model = GPT(MODEL)
        self._model = lowband.shard(
            model, scheme, lowband.Topology({}), Block, torch.bfloat16, init=model.init, disk=folder
        )
        self._adamw = torch.optim.AdamW(self._model.parameters(), lr=1e-3, fused=True)
        engine = engine_of(self._model)
        self._disks, self.ledger = engine.on_disk(), engine.ledger
        drawn = torch.Generator().manual_seed(1)
        length = min(tokens, MODEL.seq_len)
        self._tokens = torch.randint(MODEL.vocab, (tokens // length, length), generator=drawn)

    @property
    def is_direct(self) -> bool:
        return all(disk.is_direct for disk, _ in self._disks)

    def train(self) -> None:
        self._model(self._tokens, self._tokens).backward()
        self._adamw.step()
        self._adamw.zero_grad()

    def move(self) -> None:
        """Read and write the states, as a step does."""
        disks = [disk for disk, _ in self._disks]
        disks[0].start_read()
        for (disk, shards), following in zip(self._disks, [*disks[1:], None], strict=True):
            disk.wait()
            if following is not None:
                following.start_read()
            disk.start_write(self._adamw, shards)

    def wait(self) -> None:
        for disk, _ in self._disks:
            disk.wait()


def _measure(folder: Path, tokens: int) -> _Found:
    in_memory, on_disk = _Trained(HOST, None, tokens), _Trained(DISK, folder, tokens)
    ways = {
        "compute": partial(_seconds, in_memory, in_memory.train),
        "traffic": partial(_seconds, on_disk, on_disk.move),
        "together": partial(_seconds, on_disk, on_disk.train),
    }
    on_disk.train()  # from now on the files have what the optimizer keeps, too
    on_disk.ledger.take()
    on_disk.train()
    sent = {(one.level, one.collective): one.bytes for one in on_disk.ledger.take()}
    return _Found(int(sent[DISK, FETCH.name]), on_disk.is_direct, in_turns(ways, WARMUP, TURNS))


def _seconds(trained: _Trained, step: Callable[[], None]) -> float:
    """Of a step, of IN_A_ROW."""
    begun = time.perf_counter()
    for _ in range(IN_A_ROW):
        step()
    trained.wait()
    return (time.perf_counter() - begun) / IN_A_ROW
