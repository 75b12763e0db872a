"""A fault in one system's job: the fault, what is seen of it, the same command again, and what was lost."""

import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.anchors.running import Failed, Job, is_alive
from tests.anchors.systems import LONGEST_S, SYSTEMS, Progress, job
from tests.anchors.told import Told
from tests.checkout import ROOT
from tests.faults.running import in_rank

ATTEMPTS = 3
AT_STEP = 15  # after which the fault comes; the checkpoint before is of step 10
FAULTS: dict[str, Callable[[psutil.Process], object]] = {
    "kill rank": psutil.Process.kill,
    "freeze rank": psutil.Process.suspend,
    "cut link": lambda victim: in_rank(victim, "ip", "link", "set", "eth0", "down"),
}


class Row(NamedTuple):
    """
    detected_s:   from the fault until the job had ended, or went on by itself; "" if it hung after 120 s
    exit_code:    of the command; "" if it had to be killed
    restarts:     by the system itself
    told:         whether the victim is named with the cause; after it columns of Told
    last_step:    recorded before the job ended
    resumed_from: the step from which the system went on, by itself or when the command was given again
    attempts:     of the command given again, until one ended well: a busy machine fails jobs, too
    same_end:     all losses and the final weights are those of an undisturbed run of the system, bit by bit
    """

    system: str
    fault: str
    ranks: int
    repeat: int
    detected_s: str
    exit_code: str
    restarts: int
    told: bool
    lines: int
    ranks_named: str
    says_cause: bool
    says_symptom: bool
    last_step: int
    resumed_from: int
    lost_steps: int
    attempts: int
    same_end: bool


def trial(name: str, fault: str, ranks: int, repeat: int) -> tuple[Row, str]:
    """The row, and what the job printed after the fault. The victim is the last rank."""
    on_links = fault == "cut link"
    expected = undisturbed(name.replace(" --max-restarts 1", ""), ranks, on_links)
    with tempfile.TemporaryDirectory() as folder:
        one = Job(SYSTEMS[name], job(ranks, on_links), Path(folder))
        one.begin()
        known: list[psutil.Process] = []
        try:
            one.await_step(AT_STEP)
            known, printed = one.processes(), one.output.stat().st_size
            begun = time.monotonic()
            FAULTS[fault](one.rank(ranks - 1))
            detected_s, last = _watched(one, known, begun)
        finally:
            known += one.processes()
            code = one.exit_code
            one.kill(known)
        output = _without_paths(one.output.read_bytes()[printed:].decode(errors="replace"), folder)
        restarts = len(one.progress.starts) - 1 if SYSTEMS[name].restarts else 0
        attempts, again = 0, code
        while again != 0 and attempts < ATTEMPTS:
            one.begin()
            attempts, again = attempts + 1, one.end()
        found = one.progress
        resumed = min(found.starts[1:] or found.starts)  # lowband keeps the last one alone
    told = Told.by(output, fault)
    row = Row(
        system=name, fault=fault, ranks=ranks, repeat=repeat,
        detected_s="" if detected_s is None else f"{detected_s:.2f}",
        exit_code="" if code is None else str(code),
        restarts=restarts, told=ranks - 1 in told.ranks_named, lines=told.lines,
        ranks_named=" ".join(map(str, told.ranks_named)), says_cause=told.says_cause,
        says_symptom=told.says_symptom, last_step=last, resumed_from=resumed,
        lost_steps=last - resumed, attempts=attempts, same_end=_is_same(found, expected),
    )  # fmt: skip
    return row, output


def _watched(one: Job, known: list[psutil.Process], begun: float) -> tuple[float | None, int]:
    """Seconds until the job had ended or gone on by itself, None if neither; the last step before that.

    known: the processes at the fault: the job has ended when they all have
    """
    went_on_s, last, deadline = None, 0, begun + LONGEST_S
    while time.monotonic() < deadline:
        if one.exit_code is not None and not any(is_alive(process) for process in known):
            took = time.monotonic() - begun
            return (took, one.progress.last) if went_on_s is None else (went_on_s, last)
        progress = one.progress
        if went_on_s is None and len(progress.starts) > 1:
            went_on_s = time.monotonic() - begun
            deadline += LONGEST_S
        elif went_on_s is None:
            last = progress.last
        time.sleep(0.05)
    return went_on_s, last


@cache
def undisturbed(name: str, ranks: int, on_links: bool) -> Progress:
    with tempfile.TemporaryDirectory() as folder:
        one = Job(SYSTEMS[name], job(ranks, on_links), Path(folder))
        one.begin()
        if one.end() != 0:
            raise Failed(one.output.read_text(errors="replace")[-2000:])
        return one.progress


def _is_same(found: Progress, expected: Progress) -> bool:
    return found.final != "" and (found.final, found.losses) == (expected.final, expected.losses)


def _without_paths(text: str, folder: str) -> str:
    """Paths of this machine replaced by names, the longest first."""
    for path, name in (
        (folder, "RUN"), (str(ROOT), "REPOSITORY"), (sys.prefix, "VENV"), (sys.base_prefix, "PYTHON"),
        (tempfile.gettempdir(), "TMP"),
    ):  # fmt: skip
        text = text.replace(path, name)
    return text
