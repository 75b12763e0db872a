"""Shipped data are what SHA256SUMS says, and what is not is told."""

import shutil
import subprocess
from pathlib import Path

import pytest

from lowband.errors import UserError
from lowband.evidence.report.verify import FOLDERS, SUMS, verify, write_sums
from tests.checkout import ROOT
from tests.printed import printed_by


def test_what_is_shipped_is_as_listed() -> None:
    good, wrong = verify(ROOT)
    assert not wrong, "run: lowband verify --write"
    listed = [line for folder in FOLDERS for line in (ROOT / folder / SUMS).read_text().splitlines()]
    assert good == len(listed) > 0


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_sha256sum_agrees() -> None:
    for folder in FOLDERS:
        subprocess.run(["sha256sum", "--check", "--quiet", SUMS], cwd=ROOT / folder, check=True)


def test_changes_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in FOLDERS:
        (tmp_path / folder / "a").mkdir(parents=True)
        for name in ("kept", "changed", "lost"):
            (tmp_path / folder / "a" / f"{name}.csv").write_text(name)
    write_sums(tmp_path)
    assert verify(tmp_path) == (6, [])
    data = tmp_path / FOLDERS[0] / "a"
    (data / "changed.csv").write_text("x")
    (data / "lost.csv").unlink()
    (data / "new.csv").write_text("new")
    lines = printed_by(capsys, "verify", "--root", str(tmp_path), code=1).splitlines()
    assert [line.partition("/a/")[2] for line in lines[:-1]] == [
        "changed.csv: changed", "lost.csv: missing", f"new.csv: not in {SUMS}",
    ]  # fmt: skip


def test_a_broken_list_is_refused(tmp_path: Path) -> None:
    for folder in FOLDERS:
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / SUMS).write_text("nonsense\n")
    with pytest.raises(UserError, match="not a checksum line"):
        verify(tmp_path)
