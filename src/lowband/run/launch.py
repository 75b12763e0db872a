"""Fork and watch the ranks of one machine, from one process that has imported torch already.

Forking takes 0.1 s where torchrun takes ten, because eight ranks need not import torch again. The parent runs
no torch computation before it forks, so no thread pool breaks in the fork.
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
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from lowband.errors import UserError
from lowband.run.orders import ORDERS, orders, read_order
from lowband.run.ranks import Rank
from lowband.spec.files import write_whole

GRACE_S = 5.0  # time between SIGTERM and SIGKILL
CAUSE_S = 2.0  # wait after the first failure seen: its cause may show a little later
LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
LOOK_S = 1.0  # interval between checks for a failure on another node


class RankFailure(Exception):
    """A rank failed. The text is its error, of one or more lines."""

    @property
    def cause(self) -> str:
        """The first line of the error."""
        return str(self).partition("\n")[0]


class TimeLimit(Exception):
    """The ranks took longer than their time limit."""


def run_local(ranks: int, work: Callable[[Rank], None], time_limit_s: float) -> None:
    """Run `work` on all ranks of a job on this machine alone, which listen to no other machine.

    Raises the same errors as `run_ranks`.
    """

    def work_on_loopback(rank: Rank) -> None:
        # gloo asks nobody who connects. By default it listens where the host's name points, e.g. on the LAN.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK)
        work(rank)

    with tempfile.TemporaryDirectory(prefix="lowband-") as folder:
        rendezvous = f"file://{folder}/rendezvous"
        all_ranks = [Rank(rank, ranks, rank, rendezvous) for rank in range(ranks)]
        run_ranks(all_ranks, work_on_loopback, time_limit_s, Path(folder))


def run_ranks(ranks: list[Rank], work: Callable[[Rank], None], time_limit_s: float, causes: Path) -> None:
    """Run `work` once per rank, each in its own process, and return when all have succeeded.

    causes: a folder for the errors of failing ranks; in a job over several nodes, one that all nodes see
    Raises RankFailure with the first failing rank's own error as soon as one fails, TimeLimit after
    `time_limit_s`, SystemExit (143) after SIGTERM, KeyboardInterrupt after SIGINT. No rank is left running in
    any case.
    """
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_rank_main, args=(rank, work, causes, os.getpid()), name=f"rank {rank.rank}")
        for rank in ranks
    ]
    with orders() as ordered:
        try:
            _fork(processes)
            _watch(processes, ordered, time.monotonic() + time_limit_s, causes)
        finally:
            _end([process for process in processes if process.pid is not None])


def _fork(processes: Sequence[BaseProcess]) -> None:
    # Signals stay blocked until a new rank has its own handlers.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ORDERS)
    try:
        for process in processes:
            process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _rank_main(rank: Rank, work: Callable[[Rank], None], folder: Path, parent: int) -> None:
    code = 1
    # If the parent is killed, only the kernel can end this rank (prctl, PR_SET_PDEATHSIG).
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
        if os.getppid() != parent:  # it was killed before the call
            os._exit(code)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the ranks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ORDERS)
    try:
        work(rank)
        code = 0
    except BaseException as error:
        if not isinstance(error, UserError):  # the parent prints it, once for all ranks
            traceback.print_exc()
        # The time determines the first failure; the other ranks fail soon after because of it.
        name = f"rank {rank.rank}"
        _record(folder, time.time_ns(), name, f"{name}: {type(error).__name__}: {str(error).strip()}")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # torch 2.13 with gloo may abort in its thread pool's exit handlers; there is nothing left to do.
        os._exit(code)


def _watch(processes: Sequence[BaseProcess], ordered: int, deadline: float, folder: Path) -> None:
    running = {process.sentinel: process for process in processes}
    failed: list[BaseProcess] = []
    is_failing = False
    while running:
        left_s = deadline - time.monotonic()
        ready = wait([ordered, *running], timeout=max(0.0, min(LOOK_S, left_s)))
        if ordered in ready:
            _obey(read_order(ordered))
            continue
        gone = [running.pop(sentinel) for sentinel in list(running) if sentinel in ready]
        for process in gone:
            process.join(GRACE_S)  # its pipe closes shortly before its exit code is available
        newly = [process for process in gone if process.exitcode]
        for process in newly:
            if _signal_of(process):  # a killed rank is the cause of its peers' broken connections
                _record(folder, 0, process.name, _end_of(process))
        failed += newly
        if not is_failing and (newly or _causes(folder)):  # here, or on another node
            is_failing = True
            deadline = min(deadline, time.monotonic() + CAUSE_S)
        if not ready and left_s <= 0:
            break
    if is_failing:
        raise RankFailure(_stopped(running.values()) + _cause(failed, folder))
    if running:
        raise TimeLimit


def _obey(order: signal.Signals | None) -> None:
    if order == signal.SIGINT:
        raise KeyboardInterrupt
    if order is not None:
        sys.exit(128 + order)


def _record(folder: Path, when_ns: int, name: str, text: str) -> None:
    with contextlib.suppress(OSError):  # a full disk; the rank's traceback is in the log
        write_whole(folder / f"{when_ns:020d}-{name.replace(' ', '-')}", text)


def _causes(folder: Path) -> list[Path]:
    """The error files, earliest first; none once another node has succeeded and removed the folder."""
    try:
        return sorted(folder.glob("[0-9]*-*"))
    except FileNotFoundError:
        return []


def _cause(failed: list[BaseProcess], folder: Path) -> str:
    """The error of the rank that failed first, on any node."""
    if causes := _causes(folder):
        return causes[0].read_text(encoding="utf-8")
    return _end_of(min(failed, key=lambda process: not _signal_of(process)))


def _end_of(process: BaseProcess) -> str:
    victim_of = _signal_of(process)
    if victim_of is not None:
        return f"{process.name} was killed by {victim_of.name}"
    return f"{process.name} ended with exit code {process.exitcode}"


def _signal_of(process: BaseProcess) -> signal.Signals | None:
    code = process.exitcode or 0
    return signal.Signals(-code) if code < 0 else None


def _stopped(processes: Iterable[BaseProcess]) -> str:
    """A phrase that names the stopped ranks, for which the other ranks wait; empty if none is stopped."""
    names = [process.name for process in processes if _state(process) in ("T", "t")]
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'} stopped (SIGSTOP); " if names else ""


def _state(process: BaseProcess) -> str:
    """The process's state letter from /proc, after the name in brackets; empty if there is no /proc."""
    try:
        stat = Path(f"/proc/{process.pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[0]


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.terminate()
        if process.is_alive():
            os.kill(process.pid or 0, signal.SIGCONT)  # a stopped process handles no signal
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        process.join()
