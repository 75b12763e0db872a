"""The faults. Each is a function that runs a case with its fault and returns what it saw of it.

A fault ends a run, or is found after a run was ended, or must be survived. What follows is the same for all:
the command is given again, and its results are compared with an undisturbed run's (trial.py).
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.context import ForkProcess
from pathlib import Path

import psutil

from lowband.box.layout import Layout
from lowband.spec.run import RunSpec
from lowband.spec.run_folder import RunFolder
from tests.dist.started import begun
from tests.faults.running import LONGEST_S, Running, files_of_newest_checkpoint, in_rank, until

AHEAD_S = 3600


@dataclass(frozen=True)
class Seen:
    """
    detected_s: from the fault to the end of the run, or to the refusal; None for a fault to be survived
    code:       exit code; None if the run did not end
    lines:      printed for the user
    wrong:      what should not have happened; empty if nothing
    """

    detected_s: float | None
    code: int | None
    lines: tuple[str, ...]
    wrong: str = ""


class TooLate(Exception):
    """The run ended before the fault."""


def _ended(run: Running, start: float, code: int, line: str, status: str | None = "error") -> Seen:
    """After a fault that ends the run: it ended with this code, one line for the user, and this outcome."""
    found = run.end()
    took = time.monotonic() - start
    lines, outcome = tuple(run.printed()), run.folder.read_outcome()
    wrong = [
        *([] if found is not None else ["it did not end"]),
        *([] if found in (code, None) else [f"exit code {found}, not {code}"]),
        *([] if not line or any(re.search(line, each) for each in lines) else [f"no line '{line}'"]),
        *([] if (outcome and outcome.status) == status else [f"outcome {outcome and outcome.status}"]),
    ]
    return Seen(took, found, lines, "; ".join(wrong))


def _survived(run: Running) -> Seen:
    code = run.end()
    return Seen(None, code, tuple(run.printed()), "" if code == 0 else f"exit code {code}")


def _started(run: Running, command: list[str] | None = None, **variables: str) -> float:
    run.begin(command, **variables)
    run.await_moment()
    if not run.is_alive:
        raise TooLate
    return time.monotonic()


def kill_rank(run: Running) -> Seen:
    _started(run)
    victim, start = run.victim(), time.monotonic()
    victim.kill()
    return _ended(run, start, 1, rf"^rank {run.case.victim} was killed by SIGKILL$")


def freeze_rank(run: Running) -> Seen:
    _started(run)
    victim, start = run.victim(), time.monotonic()
    victim.suspend()
    return _ended(run, start, 1, rf"rank {run.case.victim} is stopped \(SIGSTOP\)")


def pause_rank(run: Running) -> Seen:
    """Shorter than the peers' patience."""
    _started(run)
    victim = run.victim()
    victim.suspend()
    time.sleep(3)
    victim.resume()
    return _survived(run)


def end_launcher(run: Running) -> Seen:
    start = _started(run)
    assert run.process is not None
    run.process.terminate()
    return _ended(run, start, 143, "^ended by SIGTERM")


def interrupt(run: Running) -> Seen:
    start = _started(run)
    assert run.process is not None and run.process.pid is not None
    os.killpg(run.process.pid, signal.SIGINT)
    return _ended(run, start, 130, "^interrupted$")


def kill_launcher(run: Running) -> Seen:
    """Nobody is left to say anything, so no rank may be left either."""
    _started(run)
    ranks, start = run.ranks(), time.monotonic()
    assert run.process is not None
    run.process.kill()
    _, alive = psutil.wait_procs(ranks, timeout=LONGEST_S)
    took = time.monotonic() - start
    code = run.end()
    return Seen(took, code, tuple(run.printed()), f"{len(alive)} ranks are left" if alive else "")


def fill_disk(run: Running) -> Seen:
    start = _started(run)
    filler = run.folder.path / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    seen = _ended(run, start, 1, "No space left on device", None)
    filler.unlink()
    return seen


def disk_turns_read_only(run: Running) -> Seen:
    """Between two attempts: the kernel allows it only while no file is open."""
    _stopped(run)
    _mount(run.folder, "remount,ro")
    try:
        return _refused(run, "Read-only file system")
    finally:
        _mount(run.folder, "remount,rw")


def truncate_checkpoint(run: Running) -> Seen:
    return _damaged(run, lambda path: os.truncate(path, path.stat().st_size // 2))


def flip_a_bit_of_checkpoint(run: Running) -> Seen:
    def flip(path: Path) -> None:
        data = bytearray(path.read_bytes())
        bit = run.case.rng.randrange(8 * len(data))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)

    return _damaged(run, flip)


def lose_a_file_of_checkpoint(run: Running) -> Seen:
    return _damaged(run, Path.unlink)


def cut_log(run: Running) -> Seen:
    """The last record is half written, as after a power cut."""
    _stopped(run)
    if run.folder.steps.exists():
        data = run.folder.steps.read_bytes()
        os.truncate(run.folder.steps, max(0, len(data) - run.case.rng.randrange(1, 60)))
    return _nothing_seen()


def cut_outcome(run: Running) -> Seen:
    _stopped(run)
    run.folder.outcome.write_text('{"status": "o')
    return _nothing_seen()


def run_twice(run: Running) -> Seen:
    """A second command on the same folder is refused, and the first goes on, whose ranks do not stop."""
    _started(run)
    with _waiting(run.process):  # it would end before the second one looks, where that is slow to start
        seen = _refused(run, "is being run by process")
    first = run.end()
    return seen if first == 0 else replace(seen, wrong=f"{seen.wrong}; exit code {first} of the first")


@contextmanager
def _waiting(process: ForkProcess | None) -> Iterator[None]:
    assert process is not None and process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGCONT)


def clock_jumps(run: Running) -> Seen:
    """Ahead or back by an hour, in the launcher and all ranks."""
    folder = Path(tempfile.mkdtemp())
    library, jump = folder / "clock.so", folder / "jump"
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True, timeout=60)
    _started(run, ["train", str(run.folder.spec)], LD_PRELOAD=str(library), CLOCK_JUMP=str(jump))
    jump.write_text(str(run.case.rng.choice([-AHEAD_S, AHEAD_S])))
    seen = _survived(run)
    shutil.rmtree(folder)
    late = [step.step for step in run.folder.whole_steps() if not 0 < step.step_time_s < LONGEST_S]
    outcome = run.folder.read_outcome()
    if late or outcome is None or not 0 < outcome.wall_s < LONGEST_S:
        return Seen(None, seen.code, seen.lines, f"times of the jump are recorded: steps {late}")
    return seen


def cut_link(run: Running) -> Seen:
    _started(run, ["train", "--links", "private", str(run.folder.spec)])
    victim, start = run.victim(), time.monotonic()
    in_rank(victim, "ip", "link", "set", "eth0", "down")
    return _ended(run, start, 1, "rank")


def slow_link(run: Running) -> Seen:
    """A hundredth of its rate, for as long as it takes: results do not change, unless peers lose patience."""
    _started(run, ["train", "--links", "private", str(run.folder.spec)])
    victim, start = run.victim(), time.monotonic()
    shaped = ["dev", "eth0", "parent", "1:", "classid", "1:20", "htb", "rate"]
    in_rank(victim, "tc", "class", "change", *shaped, _hundredth(run), "burst", "3028", "cburst", "3028")
    if (code := run.end()) == 0:
        return Seen(None, code, tuple(run.printed()))
    return _ended(run, start, 1, "rank")


def _hundredth(run: Running) -> str:
    """Of the rate of the victim's own link."""
    spec = RunSpec.read_json(run.folder.spec)
    links = Layout.of(spec.machine, spec.ranks).up_links()
    [rate] = [link.bits_per_s for link in links if link.rank == run.case.victim]
    return f"{max(1, rate // 100)}bit"


def _stopped(run: Running) -> None:
    """A run that a power cut has ended."""
    _started(run)
    run.kill()


def _nothing_seen() -> Seen:
    return Seen(None, -signal.SIGKILL, ())


def _damaged(run: Running, damage: Callable[[Path], object]) -> Seen:
    """The newest checkpoint of an ended run is damaged: the rerun must notice; it takes the one before."""
    _stopped(run)
    if not run.folder.has_checkpoint:
        return _nothing_seen()
    damage(run.case.rng.choice(files_of_newest_checkpoint(run.folder)))
    return _nothing_seen()


def _refused(run: Running, line: str) -> Seen:
    """Another attempt is refused in one line, with exit code 2."""
    error = run.folder.path.parent / "refused"  # the first one's stderr stays its own
    start = time.monotonic()
    process = begun(run.folder.spec, lambda: os.dup2(os.open(error, os.O_WRONLY | os.O_CREAT), 2))
    process.join(LONGEST_S)
    took, printed = time.monotonic() - start, error.read_text().replace(str(run.folder.path), "RUN")
    is_right = process.exitcode == 2 and line in printed and printed.count("\n") == 1
    wrong = "" if is_right else f"exit code {process.exitcode}: {printed}"
    return Seen(took, process.exitcode, tuple(printed.splitlines()), wrong)


def _mount(folder: RunFolder, options: str) -> None:
    until(
        lambda: (
            not subprocess.run(
                ["mount", "-o", options, folder.path], capture_output=True, timeout=20
            ).returncode
        ),
        "the disk is busy",
    )


ENDING = (kill_rank, freeze_rank, end_launcher, interrupt, kill_launcher)
AT_REST = (truncate_checkpoint, flip_a_bit_of_checkpoint, lose_a_file_of_checkpoint, cut_log, cut_outcome)
SURVIVED = (pause_rank, run_twice, clock_jumps)
ON_A_DISK = (fill_disk, disk_turns_read_only)
ON_LINKS = (cut_link, slow_link)
KINDS: dict[str, Callable[[Running], Seen]] = {
    kind.__name__.replace("_", " "): kind for kind in (*ENDING, *AT_REST, *SURVIVED, *ON_A_DISK, *ON_LINKS)
}
