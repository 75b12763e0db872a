"""Documents say what the shipped results say."""

import shutil
from pathlib import Path

from lowband.report.documents import BLOCKS, write_documents

ROOT = Path(__file__).parents[2]


def test_documents_are_true(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copytree(ROOT / "results" / "reference", tmp_path / "results" / "reference")
    write_documents(tmp_path)
    for document, _ in BLOCKS.values():
        assert (tmp_path / document).read_text() == (ROOT / document).read_text(), "run: lowband documents"
