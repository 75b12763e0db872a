"""A part is measured in a work tree of the campaign's commit: what ended is kept, what was cut goes on."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from lowband.errors import UserError
from lowband.run.environment import cpu_name, host
from lowband.spec.files import write_whole
from lowband.spec.run_folder import RunFolder
from tests.campaign.parts import Part, Step
from tests.campaign_rows import read
from tests.named_commits import git

WORK = Path("build/campaign")  # of the tree: a work tree for each commit
ENDED = ("ok", "nan", "not run")  # a run that was overloaded, out of time or of memory is taken again
GRACE_S = 60.0  # between SIGINT and SIGKILL


class Job(NamedTuple):
    """A run, or a step.

    has_ended: whether all of its rows are there; seconds: it took, or None
    mark:      a file to write once its exit code was 0
    """

    name: str
    words: list[str]
    goes_on: bool
    has_ended: Callable[[], bool]
    seconds: float | None
    mark: Path | None = None


def checked_out(root: Path, commit: str) -> Path:
    """The work tree of the commit, without any change of its files."""
    tree = root / WORK / commit
    if not (tree / ".git").exists():
        git("worktree", "prune", root=root)
        git("worktree", "add", "--force", "--detach", str(tree), commit, root=root)
    git("reset", "--quiet", "--hard", commit, root=tree)
    return tree


def place() -> dict[str, str]:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    return {"processor": cpu_name(), "boot_id": boot, "host": host()}


class Measurement:
    """Of one part, in `tree`. took: the seconds of each run, where known, and of the whole part"""

    def __init__(self, tree: Path, name: str, part: Part, took: Mapping[str, float]) -> None:
        self.tree, self.name, self.part, self.took = tree, name, part, took
        self.out = tree / "build" / "campaign" / name
        self._runs, self._log, self._state = (self.out / each for each in ("runs", "log", "state.json"))

    def jobs(self) -> list[Job]:
        """Of a suite none until its specs are there. By repeat: sides of a ratio follow closely."""
        return list(self._steps() if self.part.steps else self._of_suites())

    def _of_suites(self) -> Iterator[Job]:
        runs = self._runs.iterdir() if self._runs.exists() else ()
        for run in sorted(runs, key=lambda run: (run.name.rpartition("-r")[2], run.name)):
            folder = RunFolder(run)
            words = ["lowband", "train", "--links", "private", str(folder.spec)]

            def has_ended(folder: RunFolder = folder) -> bool:
                outcome = folder.read_outcome()
                return outcome is not None and outcome.status in ENDED

            yield Job(run.name, words, False, has_ended, self.took.get(run.name))

    def _steps(self) -> Iterator[Job]:
        whole, all_rows = self.took.get(self.name), sum(step.rows or 1 for step in self.part.steps)
        for step in self.part.steps:
            mark = self.out / f"{step.file}.ended"

            def has_ended(step: Step = step, mark: Path = mark) -> bool:
                if step.rows is None:
                    return mark.exists()
                rows = read(self.out / step.file)
                return step.rows <= sum(step.seeds is None or int(row["seed"]) in step.seeds for row in rows)

            words = [word.format(out=self.out) for word in step.command]
            seconds = whole and whole * (step.rows or 1) / all_rows
            name = " ".join(takewhile(lambda word: word not in ("--work", "--out"), step.command))
            yield Job(name, words, step.goes_on, has_ended, seconds, None if step.rows else mark)

    def state(self) -> dict[str, Any]:
        """sessions: when and where work on the part began; seconds: all of them together"""
        if not self._state.exists():
            return {"sessions": [], "seconds": 0.0}
        state: dict[str, Any] = json.loads(self._state.read_text(encoding="utf-8"))
        return state

    def prepare(self) -> None:
        """Write a suite's specs. Runs of another boot are removed where some are left: all begin anew."""
        if not self.part.suites:
            return
        boots = {session["boot_id"] for session in self.state()["sessions"]}
        left = not all(job.has_ended() for job in self.jobs())
        if left and boots - {place()["boot_id"]}:
            print(f"{self.name} begins anew: the machine was started again since", flush=True)
            shutil.rmtree(self.out)
        if not self._runs.exists():
            unfinished = self.out / "unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            self.do("lowband", "spec", "--suite", *self.part.suites, "--out", str(unfinished))
            for run in unfinished.iterdir():
                if not self.part.has_run(run.name):
                    shutil.rmtree(run)
            unfinished.rename(self._runs)

    def measure(self, ends: float) -> list[str]:
        """Why it has not ended, a line each; empty: it has. ends: on `time.monotonic`"""
        left = [job for job in self.jobs() if not job.has_ended()]
        wrong: list[str] = []
        state, later, has_begun = self.state(), 0, False
        for job in left:
            left_s = ends - time.monotonic()
            if left_s <= 0 or (not job.goes_on and (job.seconds or 0.0) > left_s):
                later += 1
                continue
            if not has_begun:
                has_begun = True
                begun = datetime.now().astimezone().isoformat(timespec="seconds")
                state["sessions"].append(
                    {"begun": begun, "load_before": f"{os.getloadavg()[0]:.1f}", **place()}
                )
                write_whole(self._state, json.dumps(state, indent=1))  # a job may outlive the campaign
            start = time.monotonic()
            try:
                code = self._ended(job.words, left_s if job.goes_on and left_s < float("inf") else None)
            finally:
                state["seconds"] += time.monotonic() - start
                write_whole(self._state, json.dumps(state, indent=1))
            if code == 0 and job.mark:
                job.mark.touch()
            is_there = job.has_ended()
            print(f"{self.name}: {job.name}: {'ended' if is_there else 'not ended'}", flush=True)
            if not is_there:
                cut = "cut: it goes on when it is begun again"
                wrong.append(
                    f"{job.name}: {cut if code is None else f'exit code {code}: {self._last_line()}'}"
                )
        return [*wrong, *([f"{later} of {len(left)} left: no time"] if later else [])]

    def do(self, *words: str) -> None:
        """A command that must succeed. Raises UserError with what it said last."""
        if code := self._ended(list(words), None):
            raise UserError(
                f"exit code {code}: {self._last_line()}", where=f"{self.name}: {' '.join(words[:2])}"
            )

    def _ended(self, words: list[str], limit_s: float | None) -> int | None:
        """Exit code of `python -m WORDS` in the tree; None if it was cut."""
        self.out.mkdir(parents=True, exist_ok=True)
        paths = {
            "PYTHONPATH": os.pathsep.join(map(str, (self.tree / "src", self.tree))),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), *os.get_exec_path()]),
        }
        env = {k: v for k, v in os.environ.items() if k != "LOWBAND_COMMIT"} | paths
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *words], cwd=self.tree, env=env, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True, close_fds=False,  # it holds the campaign's lock, too
            )  # fmt: skip
            try:
                return process.wait(limit_s)
            except subprocess.TimeoutExpired:
                return None
            finally:
                if process.returncode is None:
                    _end(process)

    def _last_line(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it printed nothing")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C, and what has not ended after a while is killed: runs have sessions of their own."""
    below = psutil.Process(process.pid).children(recursive=True)
    try:
        os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_S)
    finally:
        for each in below:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        process.kill()
        process.wait()
