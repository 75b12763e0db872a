"""One mutant in a copy of the tree: its tests, in a forked process that has imported large packages."""

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import hypothesis
import numpy  # noqa: F401  imported once, for all trials; nothing of lowband may be
import pandas  # noqa: F401
import pydantic  # noqa: F401
import pytest
import torch  # noqa: F401
from hypothesis import HealthCheck


class Found(NamedTuple):
    """outcome: killed, timeout or survived; by: the test that failed, "" if its process ended before"""

    outcome: str
    by: str
    seconds: float


class Limits(NamedTuple):
    """Seconds until a mutant counts as endless: of processor time, or, where it waits, by the clock."""

    processor: int
    clock: int


class Tree:
    """A copy of a working tree without what git ignores, compiled."""

    def __init__(self, root: Path, copy: Path) -> None:
        self.path, self._root = copy / "tree", root
        listed = subprocess.run(
            ["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            check=True, capture_output=True, text=True,
        )  # fmt: skip
        for name in filter(None, listed.stdout.split("\0")):
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, self.path / name, follow_symlinks=False)  # links to folders are tracked
        # Compiled files are checked by their source's sum: a mutant may have the original's time and size.
        command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "src"]
        subprocess.run(command, cwd=self.path, check=True)

    def trial(self, file: str, source: bytes, tests: Sequence[str], limits_s: Limits) -> Found:
        """Run the tests with `source` in place of the file, until the first fails."""
        original = (self.path / file).read_bytes()
        (self.path / file).write_bytes(source)
        try:
            return self.run(tests, limits_s)
        finally:
            (self.path / file).write_bytes(original)

    def run(self, tests: Sequence[str], limits_s: Limits) -> Found:
        """The tests on the tree as it is, until the first fails."""
        answer = self.path.parent / "answer.json"
        answer.unlink(missing_ok=True)
        start = time.monotonic()
        child = os.fork()
        if child == 0:
            resource.setrlimit(resource.RLIMIT_CPU, (limits_s.processor, limits_s.processor))
            os._exit(_tested(self._root, self.path, tests, answer))
        ended, status = os.waitpid(child, os.WNOHANG)
        while not ended and time.monotonic() - start < limits_s.clock:
            time.sleep(0.05)
            ended, status = os.waitpid(child, os.WNOHANG)
        _end_all(child)  # also ranks that a broken launcher has left
        if not ended:
            os.waitpid(child, 0)
        seconds = time.monotonic() - start
        if not ended or (os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL)):
            return Found("timeout", "", seconds)
        # A process that ended without an answer was ended by the mutant.
        outcome, by = json.loads(answer.read_text()) if answer.exists() else ("killed", "")
        return Found(outcome, by, seconds)


def _end_all(group: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


class _First:
    """Remembers the first test, fixture or file that failed."""

    def __init__(self) -> None:
        self.failed = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid


def _tested(root: Path, tree: Path, tests: Sequence[str], answer: Path) -> int:
    """In the forked process: run the tests, write what was found."""
    os.setsid()
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree / "src")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = (
        "1"  # none is used, and their import takes longer than most trials
    )
    sys.path[:] = [str(tree), *(path for path in sys.path if path not in ("", str(root), str(root / "src")))]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("lowband", "tests")]:
        del sys.modules[name]
    # No example fails because the machine is slow, or because an earlier mutant left it behind.
    hypothesis.settings.register_profile(
        "mutants", derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    hypothesis.settings.load_profile("mutants")
    first = _First()
    basetemp = tree.parent / "tmp"
    arguments = [
        "-x",
        "-q",
        "-m",
        "not slow and not timed and not waits",
        "--one-try",
        "-p",
        "no:cacheprovider",
        f"--basetemp={basetemp}",
        f"--rootdir={tree}",
    ]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        code = pytest.main([*arguments, *tests], plugins=[first])
    if code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        answer.write_text(json.dumps(["survived", ""]))
    else:
        answer.write_text(json.dumps(["killed", first.failed]))
    return 0
