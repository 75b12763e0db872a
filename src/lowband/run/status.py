"""Status of a reproduction: runs that are done, running or failed and why, and the time left.

It reads run folders while jobs write them, only to inform a person; tables come from `collect`.
"""

import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from lowband.errors import UserError
from lowband.run import slow
from lowband.spec.config import Config
from lowband.spec.lock import is_held
from lowband.spec.run import RunSpec
from lowband.spec.run_folder import RunFolder

POLL_S = 5.0
DEFAULT_RESULTS = "local"  # the folder of `make reproduce`
SHOWN = 8  # runs and failures listed, at most


@dataclass(frozen=True)
class RunStatus:
    """
    state: waiting, running, died (no outcome), or the outcome's status
    share: fraction of steps done
    slow:  what of it is slow, a line each
    """

    run_id: str
    suite: str
    state: str
    cause: str = ""
    share: float = 0.0
    wall_s: float = 0.0
    slow: tuple[str, ...] = ()


@dataclass(frozen=True)
class Status:
    """The status of all runs of a reproduction."""

    runs: list[RunStatus]

    def of(self, *states: str) -> list[RunStatus]:
        return [run for run in self.runs if run.state in states]

    @property
    def ended(self) -> list[RunStatus]:
        return [run for run in self.runs if run.state not in ("waiting", "running")]

    @property
    def failed(self) -> list[RunStatus]:
        return [run for run in self.ended if run.state not in ("ok", "not run")]

    @property
    def left_s(self) -> float | None:
        """Time for the rest, one run at a time, each as long as its suite's mean ok run; None if unknown."""
        left = 0.0
        for run in self.of("waiting", "running"):
            took = [other.wall_s for other in self.of("ok") if other.suite == run.suite]
            if not took:
                return None
            left += (1 - run.share) * mean(took)
        return left


def suites_of(root: Path, results: str) -> list[str]:
    """Names of the suites that have runs in results/`results`, sorted. Raises UserError if there are none."""
    found = sorted(
        {RunSpec.read_json(path).suite for path in (root / "results").glob(f"{results}/runs/*/spec.json")}
    )
    if not found:
        known = {path.parent.name for path in (root / "results").glob("*/runs")}
        raise UserError(
            "has no runs", where=root / "results" / results, allowed=sorted({DEFAULT_RESULTS} | known)
        )
    return found


def read_status(root: Path, results: str, suites: list[str]) -> Status:
    """The state of every run of the suites, in the folder results/`results`."""
    folder = root / "results" / results / "runs"
    return Status([run_status(spec, RunFolder(folder / spec.run_id)) for spec in Config(root).runs(suites)])


def run_status(spec: RunSpec, folder: RunFolder) -> RunStatus:
    """The state of one run."""
    is_running = is_held(folder.lock)  # first: a run that ends meanwhile has an outcome
    outcome = folder.read_outcome()
    if outcome is not None and outcome.of in ("", spec.training_sum):
        found = tuple(map(str, outcome.slow))
        return RunStatus(spec.run_id, spec.suite, outcome.status, outcome.cause, 1.0, outcome.wall_s, found)
    share = min(1.0, folder.count_steps() / spec.steps)
    if is_running:
        found = tuple(map(str, slow.named(folder.whole_steps()[spec.warmup_steps :])))
        return RunStatus(spec.run_id, spec.suite, "running", share=share, slow=found)
    if folder.env.exists() or folder.lock.exists():
        return RunStatus(spec.run_id, spec.suite, "died", "it stopped without an outcome", share)
    return RunStatus(spec.run_id, spec.suite, "waiting")


def headline(status: Status) -> str:
    """One line: counts and time left."""
    states = ", ".join(
        f"{len(runs)} {name}"
        for name, runs in (
            ("ok", status.of("ok")),
            ("failed", status.failed),
            ("not run", status.of("not run")),
            ("running", status.of("running")),
            ("waiting", status.of("waiting")),
        )
        if runs
    )
    if len(status.ended) == len(status.runs):
        return f"{len(status.runs)} runs: {states}; all ended"
    left = status.left_s
    time_left = "unknown until a run of each suite has ended ok" if left is None else duration(left)
    return f"{len(status.runs)} runs: {states}; left: {time_left}"


def report(status: Status) -> str:
    """The headline, the running runs, the failed runs with their causes, and what is slow."""
    running = [f"  {run.run_id}: {run.share:.0%} of its steps" for run in status.of("running")]
    failed = [f"  {run.run_id}: {run.state}, {run.cause}" for run in status.failed]
    slowed = [f"  {run.run_id}: {line}" for run in status.runs for line in run.slow]
    return "\n".join(
        [
            headline(status),
            *_listed("running now:", running),
            *_listed("failed, and why:", failed),
            *_listed("slow ranks and links:", slowed),
        ]
    )


def _listed(title: str, lines: list[str]) -> Iterable[str]:
    if not lines:
        return []
    more = [f"  and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return [title, *lines[:SHOWN], *more]


def duration(seconds: float) -> str:
    """The duration as text, in minutes from one minute on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min" if minutes else f"{rest} s"


def follow(root: Path, results: str, suites: list[str]) -> None:
    """Show the status until every run has ended: redrawn on a terminal, a line per change in a log."""
    if sys.stdout.isatty():
        _live(root, results, suites)
        return
    printed = ""
    while True:
        status = read_status(root, results, suites)
        line = headline(status)
        if line != printed:
            sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
            sys.stdout.flush()
            printed = line
        if len(status.ended) == len(status.runs):
            return
        time.sleep(POLL_S)


def _live(root: Path, results: str, suites: list[str]) -> None:
    from rich.live import Live
    from rich.progress import BarColumn, Progress, TaskID, TextColumn

    progress = Progress(TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:.0f} %"))
    everything = progress.add_task("", total=1.0)
    bars: dict[str, TaskID] = {}
    with Live(progress, refresh_per_second=2):
        while True:
            status = read_status(root, results, suites)
            done = sum(run.share for run in status.runs) / max(1, len(status.runs))
            progress.update(everything, description=headline(status), completed=done)
            running = {run.run_id: run.share for run in status.of("running")}
            for run_id in set(bars) - set(running):
                progress.remove_task(bars.pop(run_id))
            for run_id, share in running.items():
                if run_id not in bars:
                    bars[run_id] = progress.add_task(f"  {run_id}", total=1.0)
                progress.update(bars[run_id], completed=share)
            if len(status.ended) == len(status.runs):
                return
            time.sleep(POLL_S)
