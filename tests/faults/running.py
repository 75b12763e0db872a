"""A training run in a process of its own, at which a fault can be directed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkProcess
from pathlib import Path

import psutil

from lowband.spec.run import RunSpec
from lowband.spec.run_folder import RunFolder
from tests.checkout import CONFIG, ROOT
from tests.dist.started import TEXT, begun, killed, stderr_of
from tests.faults.draw import EVERY, STEPS, Case

PEER_TIMEOUT_S = 8
LONGEST_S = 120  # of anything that must end
ON_LINKS_S = 360  # of a run with a link of a hundredth of its rate
SMOKE = {spec.ranks: spec for spec in CONFIG.runs(["smoke"]) if spec.scheme.name == "zero3"}
LINKS = next(spec for spec in CONFIG.runs(["links"]) if spec.scheme.name == "hier3")


@dataclass
class Running:
    """A run of a case, and what is known of it once it has ended."""

    case: Case
    folder: RunFolder
    on_links: bool = False  # in a network of its own, with shaped links
    process: ForkProcess | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        scheme = CONFIG.scheme(self.case.scheme)
        if scheme.sync:
            scheme = scheme.model_copy(update={"sync": scheme.sync.model_copy(update={"every": EVERY})})
        if self.on_links:
            machine = LINKS.machine.model_dump()
            # Links of 0.5 MB/s, and so slow a computation that a busy machine keeps its pace.
            machine["box"] |= {"scale": 1e5, "tflops": 2}
            some = LINKS.model_dump() | {"machine": machine}
        else:
            some = SMOKE[self.case.ranks].model_dump()
        spec = RunSpec.parse(
            some | {
                "ranks": self.case.ranks, "scheme": scheme.model_dump(), "text": TEXT, "steps": STEPS,
                "checkpoint_every": EVERY, "peer_timeout_s": PEER_TIMEOUT_S, "time_limit_s": self.longest_s,
                "model": SMOKE[8].model.model_dump() | {"layers": 1, "hidden": 32}, "micro_batch": 1,
                "seq_len": 32, "warmup_steps": 1, "compute_dtype": "fp32", "reduce_dtype": "fp32",
            },
            "case",
        )  # fmt: skip
        self.folder.spec.write_text(spec.to_json())
        stderr_of(self.folder.spec).symlink_to(self.folder.path.parent / "stderr")  # not on a full disk

    @property
    def longest_s(self) -> int:
        return ON_LINKS_S if self.on_links else LONGEST_S

    def begin(self, command: list[str] | None = None, **variables: str) -> None:
        """Start it. command: in place of forking; variables: of its environment."""

        def prepare() -> None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if command is not None:
                execute(command)

        def execute(command: list[str]) -> None:
            env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), **variables}
            os.execvpe(sys.executable, [sys.executable, "-m", "lowband", *command], env)

        self.process = begun(self.folder.spec, prepare)

    def await_moment(self) -> None:
        """Until the moment of the fault, or the end if the run ends before."""
        deadline = time.monotonic() + LONGEST_S
        while self.folder.count_steps() < self.case.step and self.is_alive and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(self.case.delay_s)

    @property
    def is_alive(self) -> bool:
        assert self.process is not None
        return self.process.is_alive()

    def ranks(self) -> list[psutil.Process]:
        """The processes of the ranks, in their order: the launcher's children. Waits until all are there."""
        assert self.process is not None and self.process.pid is not None
        deadline = time.monotonic() + LONGEST_S
        while time.monotonic() < deadline:
            found = psutil.Process(self.process.pid).children()
            if len(found) >= self.case.ranks:
                return sorted(found, key=lambda process: process.pid)
            time.sleep(0.01)
        raise TimeoutError("the ranks were not started")

    def victim(self) -> psutil.Process:
        return self.ranks()[self.case.victim]

    def end(self) -> int | None:
        """Wait for the end; returns the exit code, None if it did not end and was killed."""
        assert self.process is not None
        self.process.join(self.longest_s)
        code = self.process.exitcode
        killed(self.process)
        return code

    def kill(self) -> None:
        """All of its processes at once, as a power cut does."""
        assert self.process is not None and self.process.pid is not None
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        killed(self.process)

    def printed(self) -> list[str]:
        """What it said to the user; tracebacks are left out."""
        lines = stderr_of(self.folder.spec).read_text(errors="replace").splitlines()
        mine = [line.removeprefix("lowband: ") for line in lines if line.startswith("lowband: ")]
        return [line.replace(str(self.folder.path), "RUN") for line in mine]

    def observed(self) -> "Observed | None":
        outcome = self.folder.read_outcome()
        if outcome is None:
            return None
        steps = tuple((s.step, s.loss, s.grad_norm, s.sent) for s in self.folder.whole_steps())
        return Observed(outcome.status, outcome.weights_sha256, steps, outcome.resumed_from)


@dataclass(frozen=True)
class Observed:
    """What of a run must not depend on faults, but for `resumed_from`."""

    status: str
    weights: str
    steps: tuple[object, ...]
    resumed_from: int = field(compare=False)


def in_rank(process: psutil.Process, *command: str) -> None:
    """Run a command in the network of a rank."""
    subprocess.run(["nsenter", "-t", str(process.pid), "-n", *command], check=True, timeout=20)


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LONGEST_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.02)


def files_of_newest_checkpoint(folder: RunFolder) -> list[Path]:
    newest = max(folder.checkpoints.glob("*/step-[0-9]*"), key=lambda path: path.name)
    return sorted(path for path in newest.iterdir() if path.is_file())
