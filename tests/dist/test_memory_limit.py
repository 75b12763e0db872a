"""A model whose whole fp32 weights exceed what a rank may take is trained under that limit."""

import ctypes
import resource
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from test_parity import CONFIG

import lowband
from lowband.engine.api import engine_of
from lowband.engine.state_dict import own_state_dict
from lowband.engine.whole import state_digests
from lowband.model.gpt import GPT, Block
from lowband.run.joining import M_ARENA_MAX, M_MMAP_THRESHOLD
from lowband.run.on_ranks import on_ranks
from lowband.spec.model import ModelSpec

MODEL = ModelSpec(name="large", layers=36, hidden=512, heads=8, vocab=512, seq_len=4, source="test")
RANKS, INNER = 8, {"package": 4, "node": 8}
# bytes: less than the whole weights in fp32, by more than a process may find unused in what it already has
LIMIT = MODEL.parameters * 4 * 19 // 20


def limit_memory() -> None:
    """Let this process allocate LIMIT bytes of private memory from here on, and give back what it frees."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_ARENA_MAX, 1)
    libc.mallopt(M_MMAP_THRESHOLD, 2**20)
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line]
    used = int(line.split()[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (used + LIMIT, used + LIMIT))


def train_under_the_limit(scheme: str) -> list[float]:
    topology = lowband.Topology(INNER)
    limit_memory()
    with torch.device("meta"):
        model = GPT(MODEL)
    lowband.shard(model, CONFIG.scheme(scheme), topology, Block, torch.float32, init=model.init)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tokens = torch.arange(MODEL.seq_len).view(1, -1)
    loss = model(tokens, tokens)
    loss.backward()
    optimizer.step()
    assert len(state_digests(model, engine_of(model))) == len(own_state_dict(model))
    with torch.no_grad():
        return [float(loss), float(model(tokens, tokens))]


def build_whole() -> str:
    limit_memory()
    try:
        GPT(MODEL)
    except (MemoryError, RuntimeError) as error:
        return str(error)
    return "built"


def on_fresh_ranks(ranks: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """on_ranks from a new interpreter: forks of this process could use the memory that it has freed."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as fresh:
        return fresh.submit(on_ranks, ranks, work, *arguments, time_limit_s=900).result()


@pytest.mark.slow
def test_it_trains_under_the_limit() -> None:
    """Under hier3, whose weights are sharded least: others need less memory."""
    by_rank = on_fresh_ranks(RANKS, train_under_the_limit, "hier3")
    assert all(losses == by_rank[0] for losses in by_rank)
    assert by_rank[0][1] < by_rank[0][0]


def test_the_whole_model_does_not_fit() -> None:
    [found] = on_fresh_ranks(1, build_whole)
    assert "allocate memory" in found
