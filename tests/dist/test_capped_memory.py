"""States larger than the memory that the process may have: trained with the losses of the run without a cap.

The cap is RLIMIT_DATA, which needs no rights: what the process may write to and no other shares, pages of
files aside; and a control group's limit, pages of files included, where this process may make a group. Ranks
are forked from a new interpreter: from one that has run other tests they would inherit free memory, which no
cap counts.
"""

import ctypes
import json
import os
import re
import resource
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import torch
from test_tiers import adamw, placed

import lowband
from lowband.cost.memory import ADAM_MOMENT_BYTES, MASTER_BYTES
from lowband.model.gpt import GPT, Block
from lowband.run.launch import RankFailure
from lowband.run.on_ranks import on_ranks
from lowband.spec.free_memory import MOUNTED, OWN, V1, V2
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


def in_cap(tier: str, group: Path | None) -> list[float]:
    """Losses of a process that may have fewer bytes more than now than the states take.

    group: a control group, which counts what its processes take from when they are in it
    """
    with torch.device("meta"):
        states = sum(p.numel() for p in GPT(MODEL).parameters()) * (MASTER_BYTES + ADAM_MOMENT_BYTES)
    threading.stack_size(2**20)  # which count, used or not
    # glibc would keep what is freed of smaller pieces than 32 MiB.
    assert ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 2**18)
    more = int(SHARE * states)
    if group is None:
        [now] = re.findall(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
        resource.setrlimit(resource.RLIMIT_DATA, (int(now) * 1024 + more, resource.RLIM_INFINITY))
    else:
        limit_of(group).write_text(str(more))
        if psutil.swap_memory().total:
            (group / "memory.swap.max").write_text("0")
        (group / "cgroup.procs").write_text(str(os.getpid()))
    return train(tier)


def found(group: Path | None) -> list[list[float] | str]:
    """Losses without a cap and in it, and what states that stay in memory end in."""
    [without], [within] = on_ranks(1, train, "device"), on_ranks(1, in_cap, "disk", group)
    try:
        [end] = on_ranks(1, in_cap, "device", group)
    except RankFailure as error:
        end = str(error)
    return [without, within, end]


def limit_of(group: Path) -> Path:
    """The file with the limit of a control group, of version 1 or 2."""
    return next(file for file in (group / V1[0], group / V2[0]) if file.exists())


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of an own, inside of this process's."""
    for line in OWN.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            top = MOUNTED / "memory" if controllers else MOUNTED
            made = top / path.lstrip("/") / f"lowband-{os.getpid()}"
            with suppress(OSError, StopIteration):
                made.mkdir()
                try:
                    limit_of(made)
                    yield made
                    return
                finally:
                    with suppress(OSError):
                        made.rmdir()
    pytest.skip("no control group with a limit of memory can be made here")


def check(group: Path | None) -> None:
    command = [sys.executable, __file__, *([] if group is None else [str(group)])]
    done = called(*command, PYTHONPATH=os.pathsep.join(sys.path), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    without, within, end = json.loads(done.stdout.splitlines()[-1])
    assert within == without
    assert re.search(r"can't allocate memory|ended with exit code|was killed by SIGKILL", str(end)), end


def test_states_beyond_a_cap_train_as_without() -> None:
    check(None)


@pytest.mark.wide
def test_states_beyond_the_limit_of_a_control_group_train_as_without(group: Path) -> None:
    check(group)


if __name__ == "__main__":
    print(json.dumps(found(Path(sys.argv[1]) if sys.argv[1:] else None)))
