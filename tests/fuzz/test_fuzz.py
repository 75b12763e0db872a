"""A sample of the campaign, and that it notices what it looks for."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowband.errors import UserError
from tests.fuzz import __main__ as campaign
from tests.fuzz.targets import Target

ROOT = Path(__file__).parents[2]


def test_no_input_is_a_defect(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", "--inputs", "12", "--out", str(tmp_path / "inputs.csv")],
        cwd=ROOT, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = (tmp_path / "inputs.csv").read_text().splitlines()
    assert len(rows) > 20
    assert all("12" in row.split(",")[1] for row in rows[1:])


def _fails(_: Path) -> None:
    raise KeyError("x")


def _hangs(_: Path) -> None:
    time.sleep(5)


def _talks(_: Path) -> None:
    raise UserError("x " * 700, allowed="y " * 3000)


@pytest.mark.parametrize(
    ("call", "expected"), [(_fails, "traceback"), (_hangs, "hang"), (_talks, "refused"), (str, "accepted")]
)
def test_defects_are_noticed(call, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(campaign, "TIME_LIMIT_S", 0.2)
    target = Target("t", "file", "yaml", "a: 1", call)
    assert campaign.outcome(target, b"a: 2", tmp_path)[0] == expected
    assert campaign.row(target, 0, 2, tmp_path)[expected] == 2
