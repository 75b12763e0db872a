"""A case: the fault, then the same command again, and its results beside those of an undisturbed run."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import psutil

from lowband.spec.run_folder import RunFolder
from tests.faults.draw import Case
from tests.faults.kinds import KINDS, ON_A_DISK, ON_LINKS, SURVIVED, Seen, TooLate
from tests.faults.running import Observed, Running

DISK = "size=64m"
ALL_DAMAGED = "every checkpoint in this folder is damaged; remove it to start over"


@dataclass(frozen=True)
class Result:
    """
    resumed_from: the step that the command given again began from; None if the first was not ended
    wrong:        what should not have happened; empty if nothing
    """

    case: Case
    seen: Seen
    code_again: int | None
    lines_again: tuple[str, ...]
    resumed_from: int | None
    same_weights: bool
    same_steps: bool
    wrong: str


def trial(case: Case) -> Result:
    while True:
        try:
            return _trial(case)
        except (TooLate, psutil.NoSuchProcess):  # it had ended, or had not begun
            case = replace(case, step=case.step // 2, delay_s=case.delay_s / 2)


def _trial(case: Case) -> Result:
    kind = KINDS[case.kind]
    on_links = kind in ON_LINKS
    expected = undisturbed(case.scheme, case.ranks, on_links)
    with tempfile.TemporaryDirectory() as name, _disk(Path(name) / "run", kind in ON_A_DISK) as folder:
        run = Running(case, RunFolder(folder), on_links)
        try:
            seen = kind(run)
            code, lines = None, ()
            if not (kind in SURVIVED or (on_links and seen.code == 0)):
                code, lines = _again(run)
            if code == 1 and ALL_DAMAGED in lines[-1]:  # it says what to do, and the user does it
                shutil.rmtree(run.folder.checkpoints)
                code, more = _again(run)
                lines += more
        finally:
            if run.process is not None:
                run.kill()
        found = run.observed()
    wrong = [
        seen.wrong,
        *([] if code in (0, None) else [f"exit code {code} of the command given again"]),
        *([] if found is not None and found.status == "ok" else ["no result"]),
    ]
    same_weights = found is not None and found.weights == expected.weights
    same_steps = found is not None and found.steps == expected.steps
    if not (same_weights and same_steps):
        wrong.append("other results than undisturbed")
    resumed = None if code is None or found is None else found.resumed_from
    text = "; ".join(part for part in wrong if part)
    return Result(case, seen, code, lines, resumed, same_weights, same_steps, text)


def _again(run: Running) -> tuple[int | None, tuple[str, ...]]:
    run.begin(["train", "--links", "private", str(run.folder.spec)] if run.on_links else None)
    return run.end(), tuple(run.printed())


@contextmanager
def _disk(folder: Path, is_own: bool) -> Iterator[Path]:
    """A new folder, on a small disk of its own if asked for."""
    folder.mkdir()
    if not is_own:
        yield folder
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", folder], check=True, timeout=20)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=True, timeout=20)


@cache
def undisturbed(scheme: str, ranks: int, on_links: bool) -> Observed:
    """Links change no result (tests/box/test_links.py), but ranks of a box have other levels."""
    case = Case(0, "none", scheme, ranks, 0, 0.0, 0)
    with tempfile.TemporaryDirectory() as name, _disk(Path(name) / "run", is_own=False) as folder:
        run = Running(case, RunFolder(folder), on_links)
        run.begin(["train", "--links", "plain", str(run.folder.spec)] if on_links else None)
        assert run.end() == 0, run.printed()
        found = run.observed()
    assert found is not None and found.status == "ok"
    return found
