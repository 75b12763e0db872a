"""Documents say what the shipped results say."""

import re
import shutil
from pathlib import Path

import pytest
from report_runs import predictions_as_shipped

from lowband.evidence.report import shipped
from lowband.evidence.report.documents import read_blocks, write_documents
from lowband.evidence.report.page.placement import PICTURE, write_picture
from tests.checkout import ROOT


@pytest.mark.parametrize("are_predicted", [False, pytest.param(True, marks=pytest.mark.wide)])
def test_documents_are_true(are_predicted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """are_predicted: predictions anew, too, as `lowband documents` makes them"""
    if not are_predicted:
        monkeypatch.setattr(shipped, "write_predicted", predictions_as_shipped)
    for folder in ("docs", "config", "slurm", "results/reference", "results/reported"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    for file in ("README.md", "CITATION.cff"):
        shutil.copy(ROOT / file, tmp_path)
    (tmp_path / PICTURE).unlink()
    write_documents(tmp_path)
    write_picture(tmp_path)
    for document in {PICTURE, *(block.document for block in read_blocks(ROOT).values())}:
        assert (tmp_path / document).read_text() == (ROOT / document).read_text(), "run: lowband documents"


def test_every_marked_block_is_written_by_an_entry() -> None:
    """YAML keeps the last of two equal keys: a document named twice would lose blocks in silence."""
    documents = [ROOT / "README.md", ROOT / "config" / "README.md", *(ROOT / "docs").glob("*.md")]
    marked = [
        (name, str(path.relative_to(ROOT)))
        for path in documents
        for name in re.findall(r"<!-- (\w+):begin -->", path.read_text(encoding="utf-8"))
    ]
    assert sorted(marked) == sorted((name, block.document) for name, block in read_blocks(ROOT).items())
