"""The order in which processes that share the tests take the files."""

from pathlib import Path

import pytest

from tests import seconds
from tests.conftest import longest_first


def test_long_files_and_those_of_unknown_length_come_first() -> None:
    tests = [("short", 2.0), ("two", 3.0), ("new", 0.0), ("long", 4.5), ("two", 2.0), ("new", 0.0)]
    assert longest_first(tests) == ["new", "two", "long", "short"]


def test_a_busy_machine_renews_processor_seconds_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seconds, "FILE", tmp_path / "seconds.csv")

    def record(columns: tuple[str, ...], test: str, wall_s: float, used_s: float) -> None:
        recorder = seconds.Recorder(columns)
        for when in ("setup", "call"):
            report = pytest.TestReport(test, ("", 0, ""), {}, "passed", None, when, duration=wall_s / 2)
            report.processor_s = used_s / 2
            recorder.pytest_runtest_logreport(report)
        recorder.pytest_sessionfinish()

    record(seconds.COLUMNS, "a", 30.0, 4.0)
    record(seconds.COLUMNS, "short", 0.2, 0.1)
    record(("processor_s",), "a", 90.0, 6.0)
    record(("processor_s",), "b", 90.0, 2.0)
    assert seconds.rows() == {"a": {"seconds": 30.0, "processor_s": 6.0}, "b": {"processor_s": 2.0}}
    assert seconds.recorded() == {"a": 6.0, "b": 2.0}
    assert seconds.waited() == {"a": 30.0, "b": 2.0}
