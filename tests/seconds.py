"""What each test took, in tests/seconds.csv.

By wall seconds, files of long tests are begun first; by processor seconds, as those of a busy machine are
what an idle one's are, long tests are `slow`. Where only one of both is recorded, that decides.
"""

import contextlib
import csv
import resource
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

FILE = Path(__file__).with_name("seconds.csv")
LEAST_S, SLOW_S = 0.25, 10.0  # what is recorded; what counts as slow
COLUMNS = ("seconds", "processor_s")  # wall, processor


def rows() -> dict[str, dict[str, float]]:
    """By test, what is recorded of it."""
    if not FILE.is_file():
        return {}
    with FILE.open(newline="") as lines:
        return {
            row["test"]: {name: float(row[name]) for name in COLUMNS if row[name]}
            for row in csv.DictReader(lines)
        }


def recorded() -> dict[str, float]:
    """By test, its processor seconds, or in want of them wall seconds."""
    return {test: row.get("processor_s", row.get("seconds", 0.0)) for test, row in rows().items()}


def waited() -> dict[str, float]:
    """By test, how long it holds the process that runs it: wall seconds, or in want of them others."""
    return {test: row.get("seconds", row.get("processor_s", 0.0)) for test, row in rows().items()}


def processor_s() -> float:
    """Seconds, in user and system mode, of this process, of its children, and of all that they waited for:
    a server of warm interpreters lasts longer than the commands that it forks.
    """
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own = sum(each.ru_utime + each.ru_stime for each in used)
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            own += sum(child.cpu_times()[:4])
    return own


class Meter:
    """Notes on each report the processor seconds since the one before; in the process that runs the tests."""

    def __init__(self) -> None:
        self._before = 0.0

    def pytest_runtest_logstart(self) -> None:
        self._before = processor_s()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        now = processor_s()
        report.processor_s = now - self._before  # type: ignore[attr-defined]
        self._before = now
        return report


class Recorder:
    """Renews the columns, of the tests that ran (`--record-seconds`, `--record-processor-seconds`)."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self._columns = columns
        self._took: dict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(columns, 0.0))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        took = {"seconds": report.duration, "processor_s": report.processor_s}  # type: ignore[attr-defined]
        for name in self._columns:
            self._took[report.nodeid][name] += took[name]

    def pytest_sessionfinish(self) -> None:
        renewed = rows()
        for test, took in self._took.items():
            renewed[test] = renewed.get(test, {}) | took
        with FILE.open("w", newline="") as lines:
            out = csv.writer(lines, lineterminator="\n")
            out.writerow(["test", *COLUMNS])
            for test, row in sorted(renewed.items()):
                if max(row.values()) >= LEAST_S:
                    out.writerow([test, *(f"{row[name]:.1f}" if name in row else "" for name in COLUMNS)])
