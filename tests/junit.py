"""One run of pytest in a process of its own, counted."""

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from tests.timed import FAILED_TWICE

COMMAND = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]


def counted(arguments: Sequence[str]) -> dict[str, Any]:
    """tests, skipped, failed, which: the names of those that failed, whose output is printed.

    A run that fails without naming a test counts as one failure: a timed test that failed twice, or no test.
    Raises RuntimeError where pytest could not begin.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        ended = subprocess.run([*COMMAND, *arguments, f"--junitxml={report}"], capture_output=True, text=True)
        if not report.exists():
            raise RuntimeError(ended.stdout + ended.stderr)
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    wrong = [
        case.get("name", "")
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    wrong += [line.split("::")[-1] for line in ended.stdout.splitlines() if line.startswith(FAILED_TWICE)]
    if ended.returncode and not wrong:
        wrong = [f"exit code {ended.returncode}"]
    if wrong:
        print(ended.stdout)
    return {
        "tests": len(cases),
        "skipped": sum(case.find("skipped") is not None for case in cases),
        "failed": len(wrong),
        "which": " ".join(wrong),
    }
