"""What each test took, in tests/seconds.csv: files of long tests are begun first, and these are `slow`."""

import csv
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("seconds.csv")
LEAST_S, SLOW_S = 1.0, 10.0  # what is recorded; what counts as slow


def recorded() -> dict[str, float]:
    if not FILE.is_file():
        return {}
    with FILE.open(newline="") as lines:
        return {row["test"]: float(row["seconds"]) for row in csv.DictReader(lines)}


class Recorder:
    """Renews the rows of the tests that ran (`--record-seconds`)."""

    def __init__(self) -> None:
        self._took: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._took[report.nodeid] = self._took.get(report.nodeid, 0.0) + report.duration

    def pytest_sessionfinish(self) -> None:
        rows = recorded() | self._took
        with FILE.open("w", newline="") as lines:
            out = csv.writer(lines, lineterminator="\n")
            out.writerow(["test", "seconds"])
            out.writerows((test, f"{took:.1f}") for test, took in sorted(rows.items()) if took >= LEAST_S)
