"""A command of the workflow under a bar: steps and runs done, time left; what it prints goes to a file."""

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from lowband.errors import UserError
from lowband.run.status import Status, duration, read_status, suites_of

POLL_S = 5.0  # rarely: reading run folders takes processor time from timed runs
WIDTH = 24  # of the bar
SHOWN = 15  # lines of the file that are shown if the command fails

_STEPS = re.compile(rb"(\d+) of (\d+) steps \(\d+%\) done")


def watch(command: Sequence[str], root: Path, results: str, log: Path) -> int:
    """Run the command with its output in `log`, and return its exit code, as a shell gives it.

    results: the folder under `root`/results whose runs are counted. Raises UserError if it cannot be started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    sys.stdout.write(f"{log}: what {Path(command[0]).name} prints\n")
    sys.stdout.flush()
    began, shown = time.monotonic(), ""
    with log.open("wb") as file, _orders() as (running, told):
        try:
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
        except OSError as error:
            raise UserError(f"cannot be started: {error.strerror}", where=command[0]) from None
        running.append(process)
        if told:  # before it was one of those that are running
            process.terminate()
        code = None
        while code is None:
            with suppress(subprocess.TimeoutExpired):
                code = process.wait(POLL_S)
            line = bar(log.read_bytes(), _status(root, results), time.monotonic() - began)
            if sys.stdout.isatty():
                sys.stdout.write(f"\r\033[K{line}")
            elif line.partition("|")[0] != shown.partition("|")[0]:
                sys.stdout.write(f"{line}\n")
            shown = line
            sys.stdout.flush()
    code = 128 - code if code < 0 else code
    if sys.stdout.isatty():
        sys.stdout.write("\n")
    if code:
        last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN:]
        sys.stdout.write("\n".join([*last, f"failed with exit code {code}; all of it: {log}"]) + "\n")
    return code


@contextmanager
def _orders() -> Iterator[tuple[list[subprocess.Popen[bytes]], list[int]]]:
    """What runs, and orders to end it: SIGTERM is passed on; the command has Ctrl-C too."""
    running: list[subprocess.Popen[bytes]] = []
    told: list[int] = []

    def handle(order: int, _frame: FrameType | None) -> None:
        if order == signal.SIGTERM:
            told.append(order)
            for process in running:
                process.terminate()

    before = {order: signal.signal(order, handle) for order in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield running, told
    finally:
        for order, handler in before.items():
            signal.signal(order, handler)


def _status(root: Path, results: str) -> Status | None:
    """The runs of the reproduction; None before the first one has a spec."""
    try:
        return read_status(root, results, suites_of(root, results))
    except UserError:
        return None


def bar(printed: bytes, status: Status | None, took_s: float) -> str:
    """One line: the share of steps that Snakemake has printed as done, runs, and the time left.

    took_s: since the command was started. While runs are left, the time left is theirs, as in `lowband
    status`; after the last one, that of the remaining steps at the pace so far.
    """
    steps = _STEPS.findall(printed)
    done, total = map(int, steps[-1]) if steps else (0, 0)
    share = done / total if total else 0.0
    parts = [f"{done} of {total} steps" if total else "planning"]
    left = took_s * (1 - share) / share if share else None
    if status is not None:
        ended = f"{len(status.ended)} of {len(status.runs)} runs"
        parts.append(ended + (f", {len(status.failed)} failed" if status.failed else ""))
        if len(status.ended) < len(status.runs):
            left = status.left_s
    if share < 1:
        parts.append(f"left: {'unknown yet' if left is None else duration(left)}")
    filled = round(WIDTH * share)
    return f"[{'#' * filled}{'.' * (WIDTH - filled)}] {share:4.0%} | {'; '.join(parts)}"
