"""The records of runs -> training curves, once, or while the runs are under way."""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path

from lowband.errors import UserError
from lowband.run.curves import TOOLS, Curves, by_level
from lowband.run.status import POLL_S, run_status
from lowband.spec.records import StepRecord
from lowband.spec.run import OPTIONS, RunSpec
from lowband.spec.run_folder import RunFolder

# A curve's name: the field of a step's record; nothing where the record has null.
FIELDS = {
    "loss": "loss",
    "grad_norm": "grad_norm",
    "time_s/step": "step_time_s",
    "time_s/compute": "compute_time_s",
    "time_s/exposed_comm": "exposed_comm_time_s",
    "time_s/hidden_comm": "hidden_comm_time_s",
    "time_s/exposed_sync": "exposed_sync_time_s",
}


def export(folder: Path, tool: str, out: Path, follow: bool, say: Callable[[str], None]) -> None:
    """The curves of each run in `folder`, which is a run's, or has them in runs/.

    follow: until all have ended
    say:    takes the one line for the user
    Raises UserError if there are no runs, or curves of one of them in `out`, of W&B and MLflow any.
    """
    found = [path.parent for path in (folder / "spec.json", *sorted(folder.glob("runs/*/spec.json")))]
    runs = [_Run(path) for path in found if (path / "spec.json").exists()]
    if not runs:
        raise UserError("has no runs", where=folder, allowed="results/<name>, or the folder of a run")
    left = [out / TOOLS[tool].leaves.format(run=run.spec.run_id) for run in runs]
    if there := next((path for path in left if path.exists()), None):
        raise UserError("exists already", where=there, allowed="a new folder as --out")
    with ExitStack() as closing:  # however it ends: what is left open may lose its last steps
        for run in runs:
            closing.callback(run.close)
        while {run.write(tool, out) for run in runs} != {True} and follow:
            time.sleep(POLL_S)
    begun, steps = sum(run.written > 0 for run in runs), sum(run.written for run in runs)
    say(f"{begun} of {len(runs)} runs, {steps} steps: {out}")


class _Run:
    """A run, and how many of its steps have been written."""

    def __init__(self, path: Path) -> None:
        self.folder, self.spec = RunFolder(path), RunSpec.read_json(path / "spec.json")
        self.written, self._curves, self._is_well = 0, None, True

    def write(self, tool: str, out: Path) -> bool:
        """Write the steps that are new; returns whether the run has ended.

        A run that goes on from a checkpoint records steps again, with the same values: those are left out.
        """
        state = run_status(self.spec, self.folder).state  # first: whoever ends meanwhile has written all
        steps = self.folder.whole_steps()
        if self._curves is None and steps:
            options = self.spec.model_dump(mode="json", include=set(OPTIONS))
            names = {key: options[key]["name"] for key in ("machine", "model", "scheme")}
            self._curves = Curves(tool, out, self.spec.run_id, options | names)
        for at_s, step in _timed(steps, self.folder.steps)[self.written :]:
            self._curves.add(step.step, dict(_points(step)), at_s=at_s)
        self.written = max(self.written, len(steps))
        self._is_well = state in ("ok", "running", "waiting")
        return state not in ("waiting", "running")

    def close(self) -> None:
        if self._curves is not None:
            self._curves.close(self._is_well)


def _timed(steps: list[StepRecord], file: Path) -> list[tuple[float, StepRecord]]:
    """Each with the time of its end, seconds since 1970: the last one's is that of the file.

    Between them lies what steps took, without checkpoints and restarts, which no record has.
    """
    if not steps:
        return []
    ends = list(accumulate(step.step_time_s for step in steps))
    start = file.stat().st_mtime - ends[-1]
    return [(start + end, step) for end, step in zip(ends, steps, strict=True)]


def _points(step: StepRecord) -> Iterator[tuple[str, float]]:
    for name, field in FIELDS.items():
        if (value := getattr(step, field)) is not None:
            yield name, value
    yield "tokens_per_s", step.tokens / step.step_time_s
    yield from by_level(step.sent).items()
