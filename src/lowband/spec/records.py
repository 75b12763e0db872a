"""What a job writes into its run folder: one schema, writer and reader side by side.

    env.json      Environment   once, before the first step
    steps.jsonl   StepRecord    one line per optimizer step, full precision
    outcome.json  Outcome       once, at the end, also of a run that failed

Stored values are base units: seconds, bytes.
"""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from lowband.errors import UserError
from lowband.spec.files import write_whole
from lowband.spec.strict import Strict, read_text

# Raised when the way of measuring changes, so that rows of different ways are never mixed unseen.
MEASUREMENT_VERSION = 1

CONTROL = "control"  # collective of norms and flags, which are no part of a state

Status = Literal["ok", "oom", "timeout", "nan", "overloaded", "error", "not run"]


class Sent(Strict):
    """Bytes that one rank sent over one level's links for one purpose."""

    level: str
    collective: str
    wire: str
    bytes: int


class StepRecord(Strict):
    """One optimizer step. Times are the maximum over ranks; loss is the mean over the global batch."""

    step: int
    step_time_s: float
    compute_time_s: float | None = Field(
        description="step_time_s less exposed_comm_time_s, of the slowest rank"
    )
    exposed_comm_time_s: float | None = Field(
        description="waiting for communication; null for a peer's engine"
    )
    hidden_comm_time_s: float | None = Field(
        description="collectives behind the computation, with their copies, sums and quantization; likewise"
    )
    tokens: int
    loss: float
    grad_norm: float
    sent: tuple[Sent, ...] = Field(description="of rank 0; every rank sends the same")
    real_share: float | None = Field(
        default=None, description="where computation is paced: real over paced time, the most of all ranks"
    )


class StateBytes(Strict):
    """Peak bytes of one kind on one rank."""

    kind: str
    bytes: int


class Outcome(Strict):
    """How a run ended. `cause` is one line, empty when the status is ok."""

    status: Status
    cause: str = ""
    steps: int = Field(description="optimizer steps completed")
    wall_s: float = Field(
        default=0.0, description="from the start of the run, imports excluded, to its outcome"
    )
    resumed_from: int = Field(default=0, description="the step whose checkpoint the last attempt began with")
    checkpoint_stall_s: float = Field(default=0.0, description="longest that a checkpoint kept the training")
    measurement_version: int = MEASUREMENT_VERSION
    peak_memory_bytes_max: int = Field(
        default=0, description="of the process (CPU) or the device, over ranks"
    )
    peak_memory_bytes_min: int = 0
    peak_reserved_bytes_max: int | None = Field(
        default=None, description="of the device's allocator, fragments included, over ranks"
    )
    sent: tuple[Sent, ...] = Field(default=(), description="of rank 0 in the last step")
    outside: tuple[Sent, ...] = Field(
        default=(), description="of rank 0 in the last warm-up step, counted from outside of the engine"
    )
    states: tuple[StateBytes, ...] = Field(default=(), description="of the rank that holds most")
    interface_bytes: int | None = Field(
        default=None,
        description="in a box: what rank 0's interface sent in all steps, by the kernel's counter",
    )
    notes: str = Field(default="", description="what a reader of the run must know: `shimmed`")
    weights_sha256: str = Field(default="", description="of the final fp32 weights in the module's order")


class Environment(Strict):
    """Where and with what a run was made."""

    commit: str
    dirty: bool
    hosts: tuple[str, ...]
    device: str
    backend: str = Field(default="gloo", description="of torch.distributed; fake: nothing is computed")
    versions: dict[str, str]
    variables: dict[str, str]
    data: dict[str, Any] = Field(description="what was read: source, bytes, sha256, split")
    links: str = Field(
        default="", description="how ranks were joined: shaped, or why not, or the machine's own"
    )


class RunFolder:
    """`results/<cluster>/runs/<run_id>/`. Whole files appear at once: temporary file, flush, rename."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened = time.monotonic()
        self.spec = path / "spec.json"
        self.env = path / "env.json"
        self.steps = path / "steps.jsonl"
        self.outcome = path / "outcome.json"
        self.checkpoints = path / "checkpoints"

    def start(self) -> None:
        """Forget an earlier attempt, but for the checkpoints of one that did not come to its end."""
        if self.outcome.exists() and Outcome.read_json(self.outcome).status in ("ok", "nan"):
            shutil.rmtree(self.checkpoints, ignore_errors=True)
        for file in (self.env, self.outcome, *([] if self.checkpoints.exists() else [self.steps])):
            file.unlink(missing_ok=True)

    @contextmanager
    def causes(self, job: str) -> Iterator[Path]:
        """A folder in which all nodes of a job say why a rank failed; removed when all went well."""
        path = self.path / f"causes-{job}"
        path.mkdir(exist_ok=True)
        yield path
        shutil.rmtree(path, ignore_errors=True)

    def keep_steps(self, last: int) -> None:
        """Drop the records of steps after `last`, which will be taken again."""
        kept = [record for record in self.read_steps() if record.step <= last] if self.steps.exists() else []
        write_whole(self.steps, "".join(_line(record) for record in kept))

    def write_environment(self, environment: Environment) -> None:
        write_whole(self.env, environment.to_json())

    def append_step(self, record: StepRecord) -> None:
        with self.steps.open("a", encoding="utf-8") as file:
            file.write(_line(record))

    def write_outcome(self, outcome: Outcome) -> None:
        """Write how the run ended, with the time since this object was made."""
        timed = outcome.model_copy(update={"wall_s": time.monotonic() - self._opened})
        write_whole(self.outcome, timed.to_json())

    def read_steps(self) -> Iterator[StepRecord]:
        """The steps written so far. Raises UserError with the line of a record that does not fit."""
        for number, line in enumerate(read_text(self.steps).splitlines(), start=1):
            try:
                yield StepRecord.model_validate_json(line)
            except ValidationError as error:
                raise UserError(
                    f"is no step record: {error.errors()[0]['msg']}", where=f"{self.steps}:{number}"
                ) from None


def _line(record: StepRecord) -> str:
    return json.dumps(record.model_dump(mode="json")) + "\n"
