"""A run's folder: its spec, the records of its steps, its environment, how it ended, its checkpoints."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from lowband.errors import UserError
from lowband.spec.files import create_whole, naming, remove_unfinished, write_whole
from lowband.spec.plain_data import read_text
from lowband.spec.records import Environment, Outcome, StepRecord


class RunFolder:
    """`results/<cluster>/runs/<run_id>/`. Whole files appear at once: temporary file, flush, rename."""

    def __init__(self, path: Path, of: str = "") -> None:
        """of: the `training_sum` of what is trained in it; "" for those who only look"""
        self.path, self._of = path, of
        self._opened = time.monotonic()
        self.spec = path / "spec.json"
        self.env = path / "env.json"
        self.steps = path / "steps.jsonl"
        self.outcome = path / "outcome.json"
        self.checkpoints = path / "checkpoints"
        self.disk = path / "disk"
        self.trained = path / "trained"  # Snakemake's sign that the outcome is there
        self.lock = path / "run.lock"
        self.batch_script = path / "job.sbatch"

    def start(self) -> str:
        """Remove an earlier attempt's files, except checkpoints and their step records if it did not finish.

        Only the holder of the lock may call this. Returns a line for the user if checkpoints are removed
        because the records of their steps are lost or damaged, else "".
        """
        ended = self.read_outcome()
        if ended is not None and ended.status in ("ok", "nan"):
            shutil.rmtree(self.checkpoints, ignore_errors=True)
        remove_unfinished(self.path)
        self.env.unlink(missing_ok=True)
        self.outcome.unlink(missing_ok=True)
        self.trained.unlink(missing_ok=True)
        recorded = len(self.whole_steps())
        removed = self._remove_checkpoints(after=recorded)
        if not self.has_checkpoint:
            self.steps.unlink(missing_ok=True)
        if not removed:
            return ""
        return (
            f"{self.steps}: has the records of {recorded} steps; checkpoints of later steps are removed, and "
            f"the run starts {'from an earlier one' if self.has_checkpoint else 'over from step 0'}"
        )

    def remove_states(self) -> None:
        """Remove what ranks kept on the disk: of no use without them, and they end without clearing up."""
        shutil.rmtree(self.disk, ignore_errors=True)

    @property
    def has_checkpoint(self) -> bool:
        """Whether a rerun can continue from a checkpoint."""
        return any(self._checkpoints())

    def _checkpoints(self) -> Iterator[tuple[int, Path]]:
        """(step, folder) of every complete checkpoint, of any spec. `engine.checkpoint` defines the names."""
        for path in self.checkpoints.glob("*/step-*"):
            number = path.name.removeprefix("step-")
            if number.isdecimal():
                yield int(number), path

    def _remove_checkpoints(self, after: int) -> bool:
        """Remove checkpoints of steps after `after`; returns whether there were any."""
        later = [path for step, path in self._checkpoints() if step > after]
        for path in later:
            shutil.rmtree(path)
        return bool(later)

    @contextmanager
    def causes(self, job: str) -> Iterator[Path]:
        """A folder in which all nodes of a job record why a rank failed; removed if none did."""
        path = self.path / f"causes-{job}"
        path.mkdir(exist_ok=True)
        yield path
        shutil.rmtree(path, ignore_errors=True)

    def go_back_to(self, step: int) -> None:
        """Remove all records and checkpoints of later steps, which will be run again.

        Checkpoints of an earlier spec are removed too: they would not match the new records.
        """
        kept = self.whole_steps()[:step]
        if len(kept) < step:
            raise UserError(
                f"has the records of {len(kept)} steps, the checkpoint of {step}", where=self.steps
            )
        write_whole(self.steps, "".join(step_line(record) for record in kept))
        self._remove_checkpoints(after=step)

    def write_environment(self, environment: Environment) -> None:
        write_whole(self.env, environment.to_json())

    def append_step(self, record: StepRecord) -> None:
        with naming(self.steps), self.steps.open("a", encoding="utf-8") as file:
            file.write(step_line(record))

    def write_outcome(self, outcome: Outcome) -> Outcome:
        """Record how the run ended, with the time since this object was made. The first outcome is kept.

        Returns the recorded outcome.
        """
        timed = outcome.model_copy(update={"wall_s": time.monotonic() - self._opened, "of": self._of})
        if create_whole(self.outcome, timed.to_json()):
            return timed
        return self.read_outcome() or timed

    def read_outcome(self) -> Outcome | None:
        """How the last attempt ended; None if its outcome is missing or damaged."""
        try:
            return Outcome.read_json(self.outcome)
        except UserError:
            return None

    def await_outcome(self, within_s: float) -> Outcome:
        """The outcome of a run that has ended, which another host may see a little later.

        Raises UserError if it does not appear in time.
        """
        deadline = time.monotonic() + within_s
        while (outcome := self.read_outcome()) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return outcome or Outcome.read_json(self.outcome)

    def read_steps(self) -> Iterator[StepRecord]:
        """The steps written so far. Raises UserError naming the first line that is not the next step's."""
        for number, line in enumerate(read_text(self.steps).splitlines(), start=1):
            where = f"{self.steps}:{number}"
            try:
                record = StepRecord.model_validate_json(line)
            except ValidationError as error:
                raise UserError(f"is not a step record: {error.errors()[0]['msg']}", where=where) from None
            if record.step != number:
                raise UserError(f"is the record of step {record.step}", where=where, allowed=f"step {number}")
            yield record

    def whole_steps(self) -> list[StepRecord]:
        """Steps 1 to n up to the first missing or damaged line, such as a crash or a full disk leaves."""
        whole: list[StepRecord] = []
        for line in self.steps.read_bytes().splitlines(keepends=True) if self.steps.exists() else []:
            try:
                record = StepRecord.model_validate_json(line)
            except ValidationError:
                break
            if record.step != len(whole) + 1 or not line.endswith(b"\n"):
                break
            whole.append(record)
        return whole

    def count_steps(self) -> int:
        """Number of complete lines of step records; not parsed, because a job may be writing them."""
        return self.steps.read_bytes().count(b"\n") if self.steps.exists() else 0


def step_line(record: StepRecord) -> str:
    """A line of steps.jsonl."""
    return json.dumps(record.model_dump(mode="json")) + "\n"
