"""A test marked `timed` that fails runs once more at the end; any other one fails at once."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT

FAILS_FIRST = """
import pathlib, pytest
def tried(name):
    seen = pathlib.Path(__file__).with_name(name)
    seen.write_text((seen.read_text() if seen.exists() else "") + "x")
    return len(seen.read_text())
@pytest.mark.timed("a try")
def test_timed():
    assert tried("timed") > {fails}
def test_other():
    assert tried("other") > {others}
@pytest.mark.wide
def test_wide():
    assert not "run"
"""


@pytest.mark.parametrize(
    ("fails", "others", "code", "says", "tries", "processes"),
    [
        (1, 0, 0, "passed alone: ", "xx", ()),
        (1, 0, 0, "passed alone: ", "xx", ("-n", "1")),
        (2, 0, 1, "FAILED twice: ", "xx", ("-n", "1")),
        (0, 1, 1, "FAILED test_tried.py::test_other", "x", ()),
    ],
)
def test_what_fails(
    tmp_path: Path, fails: int, others: int, code: int, says: str, tries: str, processes: tuple[str, ...]
) -> None:
    (tmp_path / "test_tried.py").write_text(FAILS_FIRST.format(fails=fails, others=others))
    (tmp_path / "conftest.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.conftest import *"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n timed(reason): x\n wide: y\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *processes]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    assert says in done.stdout
    assert (tmp_path / "timed").read_text() == tries
    assert (tmp_path / "other").read_text() == "x"
    assert "test_wide" not in done.stdout
