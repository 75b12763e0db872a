"""Long tests of kernels are skipped where they passed on the same files: those of tests/kernels/passed.json.

A run with `--wide` always runs them, and renews the file if none failed. In any doubt they run.
"""

import hashlib
import json
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FILE = "tests/kernels/passed.json"
LONG = (
    "tests/kernels/test_compile.py::",
    "tests/kernels/test_gpu_sequence.py::",
    "tests/kernels/test_kernels.py::",
)
# What these tests read, and what `lowband gpu` runs: no other benchmark has to do with kernels.
READ = (
    "src/lowband/kernels/**/*",
    "src/lowband/bench/kernels/**/*",
    "src/lowband/bench/gpu/**/*",
    "src/lowband/bench/compile.py",
    "src/lowband/bench/mfu.py",
    "src/lowband/bench/turns.py",
    "src/lowband/commands/gpu.py",
    "src/lowband/cost/attention.py",
    "src/lowband/cost/softmax.py",
    "src/lowband/engine/collectives/wire.py",
    "src/lowband/engine/parallel/expert_products.py",
    "src/lowband/spec/kernel_rows.py",
    "src/lowband/spec/wire.py",
    "tests/kernels/**/*",
    "tests/gpu/**/*",
)
REASON = f"passed on these files of kernels (see {FILE}); --wide runs it"


def state(root: Path) -> dict[str, Any]:
    """The version of Triton, and the SHA-256 of what these tests read, by file.

    Of docs/kernels.md only the commands for a GPU, which one of them runs. Nothing if a file is missing or
    if another Triton is installed than the pinned one.
    """
    inside = [path for pattern in READ for path in root.glob(pattern)]
    try:
        triton = metadata.version("triton")
        pinned = re.findall(r"^triton==(\S+)$", (root / "envs" / "constraints.txt").read_text(), re.MULTILINE)
        files = {
            path.relative_to(root).as_posix(): path.read_bytes()
            for path in [*inside, root / "results" / "reference" / "kernels" / "compiled.csv"]
            if path.suffix in (".py", ".c", ".csv")
        }
        page = (root / "docs" / "kernels.md").read_bytes()
    except (OSError, metadata.PackageNotFoundError):
        return {}
    files["docs/kernels.md, commands"] = page.partition(b"export PYTHONPATH=")[2].partition(b"```")[0]
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())}
    return {"triton": triton, "files": digests} if pinned == [triton] else {}


def passed(root: Path = ROOT) -> set[str]:
    """The tests that passed on today's files with today's Triton."""
    now = state(root)
    try:
        found = json.loads((root / FILE).read_text())
        tests = [str(test) for test in found.pop("tests")]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
    return set(tests) if now and found == now else set()


class Recorder:
    """Writes the file after a run in which no long test failed."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self._before = state(root)  # files may change while tests run
        self._passed: set[str] = set()
        self._has_failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid.startswith(LONG):
            self._has_failed |= report.failed
            if report.when == "call" and report.passed:
                self._passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        if self._passed and not self._has_failed and self._before and state(self._root) == self._before:
            tests = sorted(passed(self._root) | self._passed)
            text = json.dumps({**self._before, "tests": tests}, indent=1)
            (self._root / FILE).write_text(text + "\n")
