"""Ranks of one machine, forked from one process that has imported torch already, and watched.

Forking takes 0.1 s where torchrun takes ten: eight ranks need not import torch again. The parent runs no
torch computation before it forks, so no thread pool is torn in two.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from lowband.run.ranks import Rank

GRACE_S = 5.0  # from the order to end to the end by force
CAUSE_S = 2.0  # from the first failure seen to the verdict: its cause may be seen a little later


class RankFailure(Exception):
    """A rank ended badly. The text is the cause in one line."""


class TimeLimit(Exception):
    """The ranks took longer than they may."""


def run_local(ranks: int, work: Callable[[Rank], None], time_limit_s: float) -> None:
    """Run `work` on all ranks of a job that has this machine for itself. Raises as `run_ranks` does."""
    with tempfile.TemporaryDirectory(prefix="lowband-") as folder:
        rendezvous = f"file://{folder}/rendezvous"
        run_ranks(
            [Rank(rank, ranks, rank, rendezvous) for rank in range(ranks)], work, time_limit_s, Path(folder)
        )


def run_ranks(ranks: list[Rank], work: Callable[[Rank], None], time_limit_s: float, causes: Path) -> None:
    """Run `work` once per rank, each in a process of its own, and return when all have ended well.

    causes: a folder for what failing ranks say; of a job over several nodes, one that all of them see
    Raises RankFailure with the first failing rank's own error as soon as one ends badly, TimeLimit after
    `time_limit_s`; no rank is left running in either case.
    """
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_rank_main, args=(rank, work, causes), name=f"rank {rank.rank}")
        for rank in ranks
    ]
    # An order to end becomes an exception, so that `finally` ends the ranks.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    for process in processes:
        process.start()
    try:
        _watch(processes, time.monotonic() + time_limit_s, causes)
    finally:
        _end(processes)
        signal.signal(signal.SIGTERM, before)


def _rank_main(rank: Rank, work: Callable[[Rank], None], folder: Path) -> None:
    code = 1
    # If the parent is killed, nobody would end this rank: let the kernel do it (prctl, PR_SET_PDEATHSIG).
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        work(rank)
        code = 0
    except BaseException as error:
        traceback.print_exc()
        first_line = str(error).splitlines()[0] if str(error) else ""
        line = f"rank {rank.rank}: {type(error).__name__}: {first_line}"
        # The time decides who failed first: the others fail soon after, because of it.
        _say(folder, time.time_ns(), os.getpid(), line)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # torch 2.13 with gloo may abort in its thread pool's exit handlers; there is nothing left to do.
        os._exit(code)


def _watch(processes: list[BaseProcess], deadline: float, folder: Path) -> None:
    running = {process.sentinel: process for process in processes}
    failed: list[BaseProcess] = []
    while running:
        ended = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
        if not ended:
            break
        gone = [running.pop(sentinel) for sentinel in ended]
        for process in gone:
            process.join(GRACE_S)  # its pipe closes a moment before its exit code can be asked for
        newly = [process for process in gone if process.exitcode]
        for process in newly:
            if process.exitcode < 0:  # a signal's victim is the cause of its peers' broken connections
                name = signal.Signals(-process.exitcode).name
                _say(folder, 0, process.pid, f"{process.name} was killed by {name}")
        if newly and not failed:
            deadline = time.monotonic() + CAUSE_S
        failed += newly
    if failed:
        raise RankFailure(_cause(failed, folder))
    if running:
        raise TimeLimit


def _say(folder: Path, when_ns: int, pid: int | None, line: str) -> None:
    (folder / f"{when_ns:020d}-{pid}").write_text(line, encoding="utf-8")


def _cause(failed: list[BaseProcess], folder: Path) -> str:
    """What was said first, on any node."""
    first = min(folder.glob("[0-9]*-*"), default=None)
    if first is None:
        return f"{failed[0].name} ended with exit code {failed[0].exitcode}"
    return first.read_text(encoding="utf-8")


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.join()
