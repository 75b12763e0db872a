"""A model whose whole fp32 weights exceed what a rank may take is trained under that limit.

Ranks are forked from a new interpreter: what is free of the heap of a process that has run other tests is in
pieces, too small for a unit, and how much of it there is depends on which tests these were.
"""

import ctypes
import json
import os
import resource
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import lowband
from lowband.cost.bytes import unit_numels
from lowband.cost.memory import start_bytes, state_bytes
from lowband.engine.passes.engine import engine_of
from lowband.engine.passes.whole import state_digests
from lowband.engine.units.state_dict import own_state_dict
from lowband.model.gpt import GPT, Block
from lowband.run.joining import M_ARENA_MAX, M_MMAP_THRESHOLD
from lowband.run.on_ranks import on_ranks
from lowband.spec.mesh import Levels
from lowband.spec.model import ModelSpec
from tests.called import called
from tests.checkout import CONFIG

# Many small blocks: what a rank holds beside its shards (two whole blocks, gradients, buffers) is little.
MODEL = ModelSpec(name="large", layers=32, hidden=256, heads=8, vocab=512, seq_len=4, source="test")
SCHEME, RANKS, INNER = CONFIG.scheme("zero3"), 8, {"package": 4, "node": 8}
LIMIT = MODEL.parameters * 4 * 3 // 4  # bytes: of the whole weights in fp32


pytestmark = [
    pytest.mark.wide,  # what ranks hold is counted in test_counts.py; here a system sees to it
    pytest.mark.skipif(
        not hasattr(ctypes.CDLL(None), "mallinfo2"),
        reason="needs glibc 2.33, which tells what is free of the heap",
    ),
]


class HeapBytes(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def limit_memory() -> None:
    """Let this process allocate LIMIT bytes from here on, with what it has and does not use; it gives back
    what it frees."""
    libc = ctypes.CDLL(None)
    libc.mallopt(M_ARENA_MAX, 1)
    libc.mallopt(M_MMAP_THRESHOLD, 2**16)
    libc.mallinfo2.restype = HeapBytes
    threading.stack_size(2**20)  # 8 MiB for each of the engine's threads would count
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if "VmData" in line]
    used = int(line.split()[1]) * 1024 - libc.mallinfo2().fordblks
    resource.setrlimit(resource.RLIMIT_DATA, (used + LIMIT, used + LIMIT))


def train_under_the_limit() -> tuple[list[float], dict[str, int]]:
    """Losses before and after a step, and the most that was held of each kind."""
    topology = lowband.Topology(INNER)
    limit_memory()
    with torch.device("meta"):
        model = GPT(MODEL)
    lowband.shard(model, SCHEME, topology, Block, torch.float32, init=model.init)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.arange(MODEL.seq_len).view(1, -1)
    loss = model(tokens, tokens)
    loss.backward()
    optimizer.step()
    assert len(state_digests(model, engine_of(model))) == len(own_state_dict(model))
    with torch.no_grad():
        losses = [float(loss), float(model(tokens, tokens))]
    peaks = dict(engine_of(model).meter.peak)
    peaks["optim"] += sum(v.nbytes for state in optimizer.state.values() for v in state.values() if v.ndim)
    return losses, peaks


def build_whole() -> str:
    limit_memory()
    try:
        GPT(MODEL)
    except (MemoryError, RuntimeError) as error:
        return str(error)
    return "built"


def found() -> dict[str, list[Any]]:
    """By rank, what training and building find under the limit."""
    return {
        "built": on_ranks(1, build_whole),
        "trained": on_ranks(RANKS, train_under_the_limit, time_limit_s=900),
    }


@pytest.fixture(scope="module")
def in_a_new_interpreter() -> dict[str, list[Any]]:
    done = called(sys.executable, __file__, timeout=1200, PYTHONPATH=os.pathsep.join(sys.path))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_it_trains_under_the_limit(in_a_new_interpreter: dict[str, list[Any]]) -> None:
    levels = Levels.fit(INNER, RANKS)
    expected = state_bytes(unit_numels(MODEL, levels), SCHEME, levels, "fp32", "fp32", 1, "gloo")
    most = start_bytes(MODEL.unit_shapes(), SCHEME, levels, "fp32")
    assert sum(expected.values()) + most < LIMIT  # all at once, with room for activations and threads' stacks
    by_rank = in_a_new_interpreter["trained"]
    for losses, held in by_rank:
        assert losses == by_rank[0][0]
        assert losses[1] < losses[0]
        assert {kind: held.get(kind, 0) for kind in expected} == expected
        assert 0 < held["start"] <= most


def test_the_whole_model_does_not_fit(in_a_new_interpreter: dict[str, list[Any]]) -> None:
    [said] = in_a_new_interpreter["built"]
    assert "allocate memory" in said


if __name__ == "__main__":
    print(json.dumps(found()))
