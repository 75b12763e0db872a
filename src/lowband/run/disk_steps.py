"""How much of a disk's traffic a step hides: steps with states on a disk beside their parts alone, in turns.

One rank of one thread, as ranks of a CPU are. What a step computes is timed with the states in host memory,
and the traffic as the same files read and written in the same order, without computing. An optimizer's step
begins when the norm of all gradients is known and ends in the next forward (units.behind), which is timed
with it: from the end of one call of `step()` to that of another. So the forward can hide traffic, and the
backward the reads of two units and the writes of two.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

import lowband
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
    """Means over steps in a row, behind one whose update ends in the first of them.

    compute_s:   of a step with the states in host memory
    update_s:    the part of it in the optimizer
    traffic_s:   of reading and writing the states, and nothing else
    together_s:  of a step with the states on the disk
    waited_s:    the part of it in which it has waited, for the disk or for copies in memory
    overlap:     what of the shorter of the two is hidden
    state_bytes: read, and written, by a step
    direct:      whether files went around the page cache
    """

    tokens: int
    turn: int
    compute_s: float
    update_s: float
    traffic_s: float
    together_s: float
    waited_s: float
    overlap: float
    state_bytes: int
    direct: bool


class _Times(NamedTuple):
    """Of a step, in a way."""

    all_s: float
    update_s: float
    waited_s: float


class _Found(NamedTuple):
    state_bytes: int
    direct: bool
    turns: list[list[_Times]]  # of each the ways: compute, traffic, together


def measure(folder: Path) -> list[Step]:
    """Steps of each of TOKENS."""
    rows = []
    for tokens in TOKENS:
        [found] = on_ranks(1, _in_turns, folder / str(tokens), tokens, time_limit_s=TIME_LIMIT_S)
        for turn, (compute, traffic, together) in enumerate(found.turns, 1):
            hidden_s = compute.all_s + traffic.all_s - together.all_s
            rows.append(
                Step(
                    tokens, turn, compute.all_s, compute.update_s, traffic.all_s, together.all_s,
                    together.waited_s, hidden_s / min(compute.all_s, traffic.all_s), found.state_bytes,
                    found.direct,
                )
            )  # fmt: skip
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
        self._disks, self._lanes, self.ledger = engine.on_disk(), engine.lanes, engine.ledger
        drawn = torch.Generator().manual_seed(1)
        length = min(tokens, MODEL.seq_len)
        self._tokens = torch.randint(MODEL.vocab, (tokens // length, length), generator=drawn)

    @property
    def is_direct(self) -> bool:
        return all(disk.is_direct for disk, _ in self._disks)

    def train(self) -> float:
        """Returns the optimizer's seconds."""
        self._model(self._tokens, self._tokens).backward()
        begun = time.perf_counter()
        self._adamw.step()
        update_s = time.perf_counter() - begun
        self._adamw.zero_grad()
        return update_s

    def move(self) -> float:
        """Read and write the states, as a step does. Returns 0."""
        disks = [disk for disk, _ in self._disks]
        disks[0].start_read()
        for (disk, shards), following in zip(self._disks, [*disks[1:], None], strict=True):
            disk.wait()
            if following is not None:
                following.start_read()
            disk.start_write(self._adamw, shards)
        return 0.0

    def timed(self, step: Callable[[], float]) -> _Times:
        """Means over IN_A_ROW."""
        step()
        self._lanes.take_times()
        begun = time.perf_counter()
        update_s = sum(step() for _ in range(IN_A_ROW))
        all_s = time.perf_counter() - begun
        exposed_s = self._lanes.take_times().exposed_s
        self.end()
        return _Times(all_s / IN_A_ROW, update_s / IN_A_ROW, exposed_s / IN_A_ROW)

    def end(self) -> None:
        """Wait for what runs behind the last step."""
        for disk, _ in self._disks:
            disk.wait()


def _in_turns(folder: Path, tokens: int) -> _Found:
    in_memory, on_disk = _Trained(HOST, None, tokens), _Trained(DISK, folder, tokens)
    on_disk.train()  # from now on the files have what the optimizer keeps, too
    on_disk.end()
    on_disk.ledger.take()
    on_disk.train()
    sent = {(one.level, one.collective): one.bytes for one in on_disk.ledger.take()}
    ways = (in_memory, in_memory.train), (on_disk, on_disk.move), (on_disk, on_disk.train)
    turns = [[trained.timed(step) for trained, step in ways] for _ in range(WARMUP + TURNS)]
    return _Found(int(sent[DISK, FETCH.name]), on_disk.is_direct, turns[WARMUP:])
