"""Forked ranks: however they or their launcher are ended, none is left and the cause is known."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lowband.run.launch import RankFailure, run_local, run_ranks
from lowband.run.ranks import Rank
from tests.waiting import wait_for

ENDLESS = """
import threading
from lowband.run.launch import run_local
print("ready", flush=True)
run_local(8, lambda rank: threading.Event().wait(), 1000)
"""
PROMPT_S = 300  # far beyond what a busy machine needs


def start(program: str = ENDLESS) -> subprocess.Popen[str]:
    """In a session of its own, so that its ranks can be found after its end."""
    process = subprocess.Popen(
        ["env", "--default-signal=INT", sys.executable, "-c", program],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def members(session: int) -> list[int]:
    """Living processes of a session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, its_session = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue  # it ended meanwhile
        if int(its_session) == session and state not in "ZX":
            found.append(int(stat.parent.name))
    return found


def launch_eight() -> None:
    """In a session of its own, by which its ranks are found after its end."""
    os.setsid()
    run_local(8, lambda rank: threading.Event().wait(), 1000)


MOMENTS = [random.Random(seed).uniform(0, 0.05) for seed in range(20)]


@pytest.mark.parametrize("delay_s", MOMENTS, ids=lambda delay: f"{1000 * delay:.0f}ms")
def test_an_order_at_any_moment_of_the_start_ends_all(delay_s: float) -> None:
    """Eight forks take some hundredths of a second."""
    launcher = multiprocessing.get_context("fork").Process(target=launch_eight)
    launcher.start()
    assert launcher.pid is not None
    try:
        wait_for(lambda: has(launcher.pid, "SigCgt", signal.SIGTERM))
        time.sleep(delay_s)
        os.kill(launcher.pid, signal.SIGTERM)
        launcher.join(PROMPT_S)
        assert launcher.exitcode == 128 + signal.SIGTERM
        wait_for(lambda: not members(launcher.pid))
    finally:
        for pid in members(launcher.pid):
            os.kill(pid, signal.SIGKILL)


def has(pid: int, kind: str, order: signal.Signals) -> bool:
    """Whether the order is among the process's signals of a kind: caught (SigCgt) or ignored (SigIgn)."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    [orders] = [line.split()[1] for line in status if line.startswith(kind)]
    return bool(int(orders, 16) >> (order - 1) & 1)


def test_an_order_in_the_midst_of_a_fork_is_kept() -> None:
    """A hook of fork is where Python drops an exception."""
    program = (
        "import os, signal\n"
        "os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
    )
    process = start(program + ENDLESS)
    _, error = process.communicate(timeout=PROMPT_S)
    assert process.returncode == 128 + signal.SIGTERM, error
    wait_for(lambda: not members(process.pid))


def test_a_rank_that_is_ordered_to_end_as_it_is_forked_ends() -> None:
    """Before it has handlers of its own, it has its parent's."""
    program = (
        "import os, signal\n"
        "os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
        f"{ENDLESS}"
    )
    process = start(program)
    _, error = process.communicate(timeout=PROMPT_S)
    assert "was killed by SIGTERM" in error
    assert not members(process.pid)


def test_control_c_reaches_the_launcher_alone() -> None:
    """A terminal sends it to all processes; ranks would print a traceback each."""
    process = start()
    wait_for(lambda: sum(has(pid, "SigIgn", signal.SIGINT) for pid in members(process.pid)) == 8)
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=PROMPT_S)
    assert error.count("Traceback") == 1
    assert error.splitlines()[-1] == "KeyboardInterrupt"
    wait_for(lambda: not members(process.pid))


def test_ranks_end_with_a_launcher_that_is_killed_while_it_forks() -> None:
    program = (
        "import os, signal\n"
        "os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGKILL))\n"
        "os.register_at_fork(after_in_child=lambda: __import__('time').sleep(0.5))\n"
    )
    process = start(program + ENDLESS)
    process.communicate(timeout=PROMPT_S)
    wait_for(lambda: not members(process.pid))


def stop(process: Path) -> None:
    """This process, which others find at `process`."""
    process.symlink_to(f"/proc/{os.getpid()}")
    os.kill(os.getpid(), signal.SIGSTOP)


def is_stopped(process: Path) -> bool:
    return process.exists() and (process / "stat").read_text().rpartition(")")[2].split()[0] == "T"


def test_a_stopped_rank_is_named_and_ended(tmp_path: Path) -> None:
    """Rank 1 stops; rank 0 waits for it in vain, as for a barrier with a timeout."""

    def work(rank: Rank) -> None:
        if rank.rank == 1:
            stop(tmp_path / "stopped")
        wait_for(lambda: is_stopped(tmp_path / "stopped"))
        raise TimeoutError("waited in vain")

    with pytest.raises(RankFailure) as failed:
        run_local(2, work, PROMPT_S)
    assert str(failed.value) == "rank 1 is stopped (SIGSTOP); rank 0: TimeoutError: waited in vain"


def test_a_rank_that_is_stopped_in_training_is_named_by_those_who_wait(tmp_path: Path) -> None:
    def work(rank: Rank) -> None:
        dist.init_process_group("gloo", init_method=rank.init_method, rank=rank.rank, world_size=rank.world)
        dist.barrier()
        if rank.rank == 2:
            stop(tmp_path / "stopped")
        wait_for(lambda: is_stopped(tmp_path / "stopped"))
        dist.irecv(torch.empty(1), src=2).wait(timedelta(seconds=1))

    with pytest.raises(RankFailure, match=r"^rank 2 is stopped \(SIGSTOP\); rank [013]: .*Timed out"):
        run_local(4, work, PROMPT_S)


def test_a_failure_on_another_node_ends_this_ones_ranks(tmp_path: Path) -> None:
    """Another node's launcher writes into the folder that all see; nothing here breaks by itself."""

    def work(rank: Rank) -> None:
        if rank.rank == 0:
            (tmp_path / "00000000000000000007-rank-9").write_text("rank 9: CUDA out of memory")
        threading.Event().wait()

    with pytest.raises(RankFailure, match=r"^rank 9: CUDA out of memory$"):
        run_ranks([Rank(rank, 16, rank, "env://") for rank in range(2)], work, PROMPT_S, tmp_path)


def test_all_lines_of_an_error_are_kept() -> None:
    """NCCL reports that memory is out on a later line."""

    def work(rank: Rank) -> None:
        raise RuntimeError("NCCL error\nunhandled cuda error\nCuda failure 2 'out of memory'")

    with pytest.raises(RankFailure) as failed:
        run_local(1, work, 100)
    assert str(failed.value).splitlines()[0] == "rank 0: RuntimeError: NCCL error"
    assert str(failed.value).splitlines()[-1] == "Cuda failure 2 'out of memory'"


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """What is done with signals afterwards is what was done before."""
    before = [signal.getsignal(order) for order in (signal.SIGTERM, signal.SIGINT)]
    yield
    assert [signal.getsignal(order) for order in (signal.SIGTERM, signal.SIGINT)] == before
    assert signal.set_wakeup_fd(-1) == -1
