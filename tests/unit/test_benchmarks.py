"""Documents say what the shipped results say."""

import re
import shutil
from pathlib import Path

from lowband.evidence.report.documents import read_blocks, write_documents
from lowband.evidence.report.page.placement import PICTURE, write_picture

ROOT = Path(__file__).parents[2]


def test_documents_are_true(tmp_path: Path) -> None:
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
