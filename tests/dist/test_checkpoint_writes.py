"""Writes in the background: no failure is lost, no rank waits for ever, earlier checkpoints stay whole."""

import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist
from checkpoints import bag
from torch.testing._internal.distributed.fake_pg import FakeStore

import lowband
from lowband.engine.checkpoint import checkpointer as checkpoint_module
from lowband.engine.checkpoint.manifest import MANIFEST, Manifest
from lowband.engine.checkpoint.owner import Owner
from lowband.engine.checkpoint.rank_file import verify_rank_file
from lowband.engine.transport import meeting
from lowband.run import launch
from lowband.run.launch import RankFailure
from lowband.run.on_ranks import on_ranks
from tests.called import called
from tests.waiting import wait_for

HERE = Path(__file__).parent


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing raised"


def assert_whole(checkpoint: Path) -> None:
    manifest = Manifest.read(checkpoint)
    for rank, file in enumerate(manifest.files):
        verify_rank_file(checkpoint, rank, file, lambda: None)


def fill_the_disk_of_rank_1(folder: str) -> tuple[str, str, str, str]:
    """Its files may not grow, as on a full disk, after the first checkpoint."""
    checkpointer, here = lowband.Checkpointer(folder), bag()
    checkpointer.save(1, *here)
    checkpointer.wait()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    checkpointer.save(2, *here)
    at_next_save = error_of(lambda: checkpointer.save(3, *here))
    checkpointer.save(3, *here)
    at_wait = error_of(checkpointer.wait)
    latest = str(checkpointer.latest())
    checkpointer.load(latest, *here)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    checkpointer.save(2, *here)
    checkpointer.wait()
    return at_next_save, at_wait, latest, str(checkpointer.latest())


def test_a_full_disk_is_reported_on_all_ranks_and_harms_no_earlier_one(tmp_path: Path) -> None:
    for found in on_ranks(2, fill_the_disk_of_rank_1, str(tmp_path)):
        for step, error in ((2, found[0]), (3, found[1])):
            file = tmp_path / f".step-0000000{step}.writing" / "rank-00001.bin"
            assert error == f"UserError: {file}: cannot be read or written: File too large"
        assert found[2:] == (str(tmp_path / "step-00000001"), str(tmp_path / "step-00000002"))
    # Nothing is left of the writes that failed.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def fill_the_disk_of_rank_0(folder: str) -> tuple[str, str]:
    """Once all ranks have written their values: there is no room for the manifest."""
    checkpointer, here = lowband.Checkpointer(folder), bag()
    checkpointer.save(1, *here)
    checkpointer.wait()
    if dist.get_rank() == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    checkpointer.save(2, *here, {"much": "x" * 20_000})
    return error_of(checkpointer.wait), str(checkpointer.latest())


def test_every_rank_learns_why_rank_0_failed(tmp_path: Path) -> None:
    file = tmp_path / ".step-00000002.writing" / MANIFEST
    expected = f"UserError: {file}: cannot be read or written: File too large"
    found = on_ranks(2, fill_the_disk_of_rank_0, str(tmp_path))
    assert found == [(expected, str(tmp_path / "step-00000001"))] * 2


def save_over_an_older_one(folder: str) -> int:
    checkpointer = lowband.Checkpointer(folder)
    for steps in (1, 2):
        checkpointer.save(5, *bag(), {"attempt": steps})
    checkpointer.wait()
    return checkpointer.load(checkpointer.latest(), *bag(steps=0))["attempt"]


def test_a_checkpoint_of_the_same_step_is_replaced(tmp_path: Path) -> None:
    assert on_ranks(2, save_over_an_older_one, str(tmp_path)) == [2, 2]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def one_checkpointer_per_save(folder: str) -> int:
    """No file is written before another one waits for it, to save or to load."""
    others_wait, write, wait = threading.Semaphore(0), checkpoint_module.write_rank_file, Owner.wait_for_last

    def late(*arguments: object) -> object:
        assert others_wait.acquire(timeout=60)
        return write(*arguments)

    def waits(owner: Owner) -> None:
        if is_begun.is_set():
            others_wait.release()
        wait(owner)

    is_begun = threading.Event()
    checkpoint_module.write_rank_file, Owner.wait_for_last = late, waits
    for step in (1, 2, 3):
        lowband.Checkpointer(folder).save(step, *bag(), {"step": step})
        is_begun.set()
    return lowband.Checkpointer(folder).load_newest(*bag(steps=0))["step"]


def test_a_new_checkpointer_waits_for_the_one_before_it(tmp_path: Path) -> None:
    assert on_ranks(2, one_checkpointer_per_save, str(tmp_path)) == [3, 3]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def killed_between_two_names(folder: str) -> list[int | None]:
    """As if the process had been killed after the old checkpoint was renamed, before the new one was; what is
    loaded then, and after another save.
    """
    checkpointer = lowband.Checkpointer(folder)
    checkpointer.save(5, *bag(), {"attempt": 1})
    checkpointer.wait()
    if dist.get_rank() == 0:
        Path(folder, "step-00000005").rename(Path(folder, ".step-00000005.replaced"))
    dist.barrier()
    found = [checkpointer.load_newest(*bag(steps=0))["attempt"]]
    checkpointer.save(5, *bag(), {"attempt": 2})
    checkpointer.wait()
    return [*found, checkpointer.load_newest(*bag(steps=0))["attempt"]]


def test_a_checkpoint_that_was_about_to_be_replaced_is_not_lost(tmp_path: Path) -> None:
    assert on_ranks(2, killed_between_two_names, str(tmp_path)) == [[1, 2], [1, 2]]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def gone_back(folder: str) -> list[int]:
    """Steps loaded as the newest, after going back to the second of three checkpoints and on from it."""
    checkpointer, (model, optimizer) = lowband.Checkpointer(folder), bag()
    for step in (10, 20, 30):
        checkpointer.save(step, model, optimizer, {"step": step})
    checkpointer.wait()
    checkpointer.load(Path(folder, "step-00000020"), model, optimizer)
    found = []
    for step in (25, 30, 28):
        checkpointer.save(step, model, optimizer, {"step": step})
        found.append(checkpointer.load_newest(model, optimizer)["step"])
    return found


def test_a_training_that_was_left_is_not_gone_on_with(tmp_path: Path, capfd) -> None:
    assert on_ranks(2, gone_back, str(tmp_path)) == [[25, 30, 28]] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000025", "step-00000028", "step-00000030.left",
    ]  # fmt: skip
    assert capfd.readouterr().err.splitlines() == [
        f"lowband: {tmp_path}/step-00000030: training went on from an earlier step, and has saved {step}; "
        "renamed step-00000030.left"
        for step in (25, 28)
    ]


# ---- processes that end without `wait`

# Forks two ranks for each case, so that torch is imported once; they end as any script does.
SCRIPT = """
import json, os, sys
from pathlib import Path
import torch._dynamo, torch.distributed as dist
import lowband
from checkpoints import bag
from tests.waiting import wait_for

def rank_main(rank, folder, end):
    os.dup2(os.open(f"{folder}.{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
    dist.init_process_group("gloo", init_method=f"file://{folder}.rendezvous", rank=rank, world_size=2)
    checkpointer = lowband.Checkpointer(folder, timeout_s=60)
    checkpointer.save(1, *bag())
    exec(end)

codes = {}
for folder, end in json.loads(sys.argv[1]).items():
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid == 0:
            rank_main(rank, folder, end)
            sys.exit()
        pids.append(pid)
    codes[folder] = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
print(json.dumps(codes))
"""


def test_processes_that_end_without_wait(tmp_path: Path) -> None:
    """They end well with a whole checkpoint, or badly with a line."""
    ends, cannot_write, no_group = (tmp_path / name for name in ("ends", "cannot_write", "no_group"))
    cannot_write.write_text("no folder")
    cases = {str(ends): "", str(cannot_write): "", str(no_group): "dist.destroy_process_group()"}
    path = os.pathsep.join([str(HERE), str(HERE.parents[1] / "src")])
    done = called(sys.executable, "-c", SCRIPT, json.dumps(cases), PYTHONPATH=path, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    codes = json.loads(done.stdout)
    said = {
        folder: [
            [line for line in Path(f"{folder}.{rank}.err").read_text().splitlines() if "lowband:" in line]
            for rank in range(2)
        ]
        for folder in cases
    }
    assert codes[str(ends)] == [0, 0]
    assert said[str(ends)] == [[], []]
    assert_whole(ends / "step-00000001")

    assert codes[str(cannot_write)] == [2, 2]
    for [line] in said[str(cannot_write)]:
        assert line.startswith(f"lowband: the last checkpoint was not written: {cannot_write}")

    if codes[str(no_group)] == [0, 0]:
        assert_whole(no_group / "step-00000001")
    for code, lines in zip(codes[str(no_group)], said[str(no_group)], strict=True):
        assert bool(lines) == (code != 0)


# ---- waiting for other ranks


def timeouts(folder: str) -> tuple[float, float, float]:
    default, given = lowband.Checkpointer(folder), lowband.Checkpointer(folder, timeout_s=3)
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    return default._meeting.timeout_s, given._meeting.timeout_s, checkpoint_module.world_timeout().seconds


def test_the_timeout_is_the_jobs_own(tmp_path: Path) -> None:
    assert on_ranks(2, timeouts, str(tmp_path), time_limit_s=34) == [(17.0, 3.0, 1800)] * 2


TIMEOUT_S, STEP_S = 60, 20


class Clock:
    """Of rank 1's meetings: it stands but for what the test's work is said to take."""

    def __init__(self) -> None:
        self.now, self._pauses = 0.0, 0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, pause_s: float) -> None:
        """Between two meetings."""
        self._pauses += 1
        time.sleep(min(pause_s, 0.01))

    def slowly(self, work: Callable) -> Callable:
        """`work` that takes longer than the timeout, in steps, in each of which the ranks meet."""

        def slow(*arguments):
            tick = arguments[-1]
            for _ in range(TIMEOUT_S // STEP_S + 1):
                pauses = self._pauses
                self.now += STEP_S
                wait_for(lambda pauses=pauses: self._pauses > pauses + 1)
                tick()
            return work(*arguments)

        return slow

    def stuck(self, *_) -> None:
        self.now += TIMEOUT_S + 1
        threading.Event().wait()


def take_longer_than_the_timeout(folder: str) -> tuple[str, str, str]:
    checkpointer, here = lowband.Checkpointer(folder, timeout_s=TIMEOUT_S), bag()
    clock = Clock()
    if dist.get_rank() == 1:
        meeting.time = clock
        checkpoint_module.write_rank_file = clock.slowly(checkpoint_module.write_rank_file)
        checkpoint_module.verify_rank_file = clock.slowly(checkpoint_module.verify_rank_file)
    checkpointer.save(1, *here)
    saved = error_of(checkpointer.wait)
    loaded = error_of(lambda: checkpointer.load(checkpointer.latest(), *here))
    if dist.get_rank() == 1:
        assert clock.now > 2 * TIMEOUT_S
        checkpoint_module.write_rank_file = clock.stuck
    checkpointer.save(2, *here)
    return saved, loaded, error_of(checkpointer.wait)


def test_a_slow_rank_is_waited_for_and_a_stuck_one_is_not(tmp_path: Path) -> None:
    for saved, loaded, stuck in on_ranks(2, take_longer_than_the_timeout, str(tmp_path)):
        assert saved == loaded == "nothing raised"
        assert stuck == (
            f"TimeoutError: writing {tmp_path}/.step-00000002.writing: rank 1 has made no progress for 60 s"
        )
    assert_whole(tmp_path / "step-00000001")


def lose_rank_1(folder: str, how: int) -> None:
    """Rank 1 gets a signal while it writes; rank 0 records what it learns of that."""
    checkpointer, here = lowband.Checkpointer(folder, timeout_s=15), bag()
    pids = checkpointer._meeting.everyone(os.getpid())
    if dist.get_rank() == 1:
        checkpoint_module.write_rank_file = lambda *_: os.kill(os.getpid(), how)
    checkpointer.save(1, *here)
    Path(folder, "learned").write_text(error_of(checkpointer.wait))
    os.kill(pids[1], signal.SIGKILL)


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.waits)])
def test_a_rank_lost_while_writing_ends_the_others(
    tmp_path: Path, how: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the checkpointer's timeout: the job's own is longer than its time limit."""
    monkeypatch.setattr(launch, "CAUSE_S", 60)  # rank 0 is not ended before it has learned of it
    with pytest.raises(RankFailure):
        on_ranks(2, lose_rank_1, str(tmp_path), how, peer_timeout_s=1000)
    assert (tmp_path / "learned").read_text() != "nothing raised"
    assert not (tmp_path / "step-00000001").exists()
