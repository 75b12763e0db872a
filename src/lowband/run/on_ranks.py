"""Run a function on several gloo ranks of this machine and collect the results.

The ranks are forked (0.1 s for eight), so the calling process itself must never run autograd.
"""

import os
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # see lowband.run.train
import torch.distributed as dist

from lowband.run.launch import run_local
from lowband.run.ranks import Rank


def on_ranks(
    ranks: int,
    work: Callable[..., Any],
    *arguments: Any,
    time_limit_s: float = 120,
    peer_timeout_s: float | None = None,
    enter: Callable[[int], None] = lambda rank: None,
) -> list[Any]:
    """Run `work(*arguments)` on each rank of a gloo group; returns the results by rank.

    peer_timeout_s: how long a rank waits for another one; default: half of the time limit
    enter: called with the rank's number before its group is made, e.g. to join a network
    Raises RankFailure with the first failing rank's error, TimeLimit after `time_limit_s`.
    """
    with tempfile.TemporaryDirectory() as folder:

        def rank_main(rank: Rank) -> None:
            enter(rank.rank)
            torch.set_num_threads(1)
            dist.init_process_group(
                "gloo",
                init_method=rank.init_method,
                rank=rank.rank,
                world_size=rank.world,
                timeout=timedelta(seconds=peer_timeout_s or time_limit_s / 2),
            )
            result = work(*arguments)
            Path(folder, str(rank.rank)).write_bytes(pickle.dumps(result))
            dist.barrier()
            os._exit(0)  # see run.launch

        run_local(ranks, rank_main, time_limit_s)
        return [pickle.loads(Path(folder, str(rank)).read_bytes()) for rank in range(ranks)]
