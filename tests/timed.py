"""A second try for tests that time real messages: alone, after all others."""

import subprocess
import sys

import pytest

FAILED_TWICE = "FAILED twice: "


class SecondTry:
    """Tests marked `timed` that fail run once more at the end, each alone in a process of its own.

    A fault fails both times; a moment in which the machine was busy does not. Any other test fails at once.
    """

    def __init__(self) -> None:
        self._failed: dict[str, str] = {}  # by test: what it said
        self._lines: list[str] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and "timed" in report.keywords:
            report.outcome = "again"  # type: ignore[assignment]  # not counted as failed
            self._failed.setdefault(report.nodeid, report.longreprtext)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, str] | None:
        return ("again", "A", "AGAIN") if report.outcome == "again" else None

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return  # interrupted
        for test, said in self._failed.items():
            command = [
                sys.executable,
                "-m",
                "pytest",
                "-p",
                "no:xdist",
                "-p",
                "no:cacheprovider",
                "--one-try",
                "--wide",
            ]
            has_passed = subprocess.run([*command, test], cwd=session.config.rootpath).returncode == 0
            self._lines.append(f"{'passed alone: ' if has_passed else FAILED_TWICE}{test}")
            if has_passed:
                self._lines += [f"    before: {line}" for line in said.splitlines()[-1:]]
            else:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for line in self._lines:
            terminalreporter.write_line(line)
