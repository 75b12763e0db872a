"""States larger than the memory that the process may have: trained with the losses of the run without a cap.

The cap is RLIMIT_DATA, which needs no rights: what the process may write to and no other shares, pages of
files aside. A control group of an own is not there on every machine. Ranks are forked from a new interpreter:
from one that has run other tests they would inherit free memory, which the cap does not count.
"""

import ctypes
import json
import os
import re
import resource
import sys
import tempfile
import threading
from pathlib import Path

import torch
from test_tiers import adamw, placed

import lowband
from lowband.cost.memory import ADAM_MOMENT_BYTES, MASTER_BYTES
from lowband.model.gpt import GPT, Block
from lowband.run.launch import RankFailure
from lowband.run.on_ranks import on_ranks
from lowband.spec.model import ModelSpec
from tests.called import called

MODEL = ModelSpec(name="capped", layers=36, hidden=256, heads=4, vocab=64, seq_len=8, source="test")
SHARE = 0.95  # of the states' bytes
M_MMAP_THRESHOLD = -3  # malloc.h


def train(tier: str) -> list[float]:
    with torch.device("meta"):
        model = GPT(MODEL)
    lowband.shard(
        model, placed("zero3", tier), lowband.Topology({}), Block, torch.bfloat16, init=model.init, seed=1,
        disk=tempfile.mkdtemp() if tier == "disk" else None,
    )  # fmt: skip
    optimizer, losses = adamw(model), []
    for number in range(2):
        drawn = torch.Generator().manual_seed(number)
        loss = model(*torch.randint(MODEL.vocab, (2, 1, MODEL.seq_len), generator=drawn))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def in_cap(tier: str) -> list[float]:
    """Losses of a process that may have fewer bytes more than now than the states take."""
    with torch.device("meta"):
        states = sum(p.numel() for p in GPT(MODEL).parameters()) * (MASTER_BYTES + ADAM_MOMENT_BYTES)
    threading.stack_size(2**20)  # which count, used or not
    # glibc would keep what is freed of smaller pieces than 32 MiB.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**18)
    [now] = re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    resource.setrlimit(resource.RLIMIT_DATA, (int(now) * 1024 + int(SHARE * states), resource.RLIM_INFINITY))
    return train(tier)


def found() -> list[list[float] | str]:
    """Losses without a cap and in it, and what states that stay in memory end in."""
    [without], [within] = on_ranks(1, train, "device"), on_ranks(1, in_cap, "disk")
    try:
        [end] = on_ranks(1, in_cap, "device")
    except RankFailure as error:
        end = str(error)
    return [without, within, end]


def test_states_beyond_a_cap_train_as_without() -> None:
    done = called(sys.executable, __file__, PYTHONPATH=os.pathsep.join(sys.path), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    without, within, end = json.loads(done.stdout.splitlines()[-1])
    assert within == without
    assert re.search(r"can't allocate memory|ended with exit code", str(end)), end


if __name__ == "__main__":
    print(json.dumps(found()))
