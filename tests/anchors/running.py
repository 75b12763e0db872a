"""One job of a system, in processes at which a fault can be directed."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path

import psutil

from lowband.spec.run import RunSpec
from tests.anchors.systems import LONGEST_S, Progress, System
from tests.checkout import ROOT
from tests.warm import Forked

START_S = 600  # eight ranks that import their libraries, on a busy machine


class Failed(Exception):
    """A job ended by itself, without a fault."""


class Job:
    """A system's command in a folder; it may be given again."""

    def __init__(self, system: System, spec: RunSpec, folder: Path) -> None:
        self.system, self.spec, self.folder = system, spec, folder
        import_module(system.script)
        (folder / "spec.json").write_text(spec.to_json())
        self.output = folder / "output"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def progress(self) -> Progress:
        return self.system.progress(self.folder)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        assert self._process is not None
        return self._process.poll()

    def begin(self) -> None:
        spec = self.folder / "spec.json"
        if self.spec.machine.box is not None and self.system.on_links is not None:
            command = [sys.executable, "-m", "tests.anchors.on_links", self.system.name, str(self.folder)]
        else:
            command = self.system.command(spec, self.folder, self.spec.ranks)
        env = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "DS_ACCELERATOR": "cpu"}
        with self.output.open("ab") as output:
            self._process = Forked(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, cwd=self.folder,
                start_new_session=True,
            )  # fmt: skip

    def await_step(self, step: int) -> None:
        """Raises Failed with the output if the job ends before."""
        deadline = time.monotonic() + START_S
        while self.progress.last < step:
            if self.exit_code is not None or time.monotonic() > deadline:
                raise Failed(f"no step {step}: {self.output.read_text(errors='replace')[-2000:]}")
            time.sleep(0.05)

    def processes(self) -> list[psutil.Process]:
        """The command's own and all that it started."""
        try:
            first = psutil.Process(self.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank. lowband's are its launcher's children, in their order; peers' write it."""
        if self.system.name == "lowband":
            return sorted(self.processes()[1:], key=lambda process: process.pid)[number]
        return psutil.Process(int((self.folder / f"pid{number}").read_text()))

    def end(self, within_s: float = START_S) -> int | None:
        """Wait; returns the exit code, None if it did not end and was killed."""
        deadline = time.monotonic() + within_s
        while self.exit_code is None and time.monotonic() < deadline:
            time.sleep(0.05)
        code = self.exit_code
        self.kill(self.processes())
        return code

    def kill(self, processes: list[psutil.Process]) -> None:
        """These, which may have lost their parent, and the command's session."""
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        assert self._process is not None
        self._process.wait(LONGEST_S)


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
