"""Artifact appendices: LaTeX that is whole, short, and whose commands can be copied out of the PDF."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from lowband.evidence.claims.experiments import read_experiments
from lowband.evidence.report.appendix import APPENDICES, write_appendices
from lowband.evidence.report.writers import latex_code
from lowband.spec.plain_data import read_yaml
from tests.checkout import ROOT

CONFIG = ROOT / "config"
MOST_PAGES = 4


@pytest.fixture(scope="module")
def appendices(all_tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("appendices")
    write_appendices(all_tables / "claims.csv", CONFIG, folder)
    return folder


def commands() -> list[str]:
    """Those of the experiments that decide a contribution."""
    claims, wanted = read_yaml(CONFIG / "claims.yaml"), set()
    for entry in read_yaml(CONFIG / "contributions.yaml").values():
        wanted |= {claims[name]["experiment"] for name in entry["claims"]}
    return [each.command for name, each in read_experiments(CONFIG).items() if name in wanted]


@pytest.mark.parametrize("name", APPENDICES)
def test_an_appendix_is_whole(name: str, appendices: Path) -> None:
    text = (appendices / f"{name}.tex").read_text()
    opened, closed = (re.findall(rf"\\{word}{{(\w+)}}", text) for word in ("begin", "end"))
    assert sorted(opened) == sorted(closed)
    assert text.count("{") == text.count("}")
    assert not re.search(r"<%|%>|<<|>>", text)
    assert "--" not in text  # LaTeX makes a dash of it
    # The first thing that is said is what each badge would rest on; then five contributions.
    numbers = [f"item[C{number}]" for number in range(1, 6)]
    said = ["Available: ", "Functional: ", "Reproduced: ", *numbers, "make install"]
    places = [text.index(each) for each in said]
    assert places == sorted(places)
    assert len(re.findall(r"\\textbf{C\d: ", text)) == 5
    assert all(latex_code(command) in text for command in commands())


@pytest.mark.skipif(
    shutil.which("pdflatex") is None or shutil.which("pdftotext") is None,
    reason="needs pdflatex and pdftotext (make page-deps)",
)
@pytest.mark.parametrize("name", APPENDICES)
def test_commands_can_be_copied_from_the_pdf(name: str, appendices: Path) -> None:
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", f"{name}.tex"]
    result = subprocess.run(command, cwd=appendices, capture_output=True, text=True, errors="replace")
    assert result.returncode == 0, result.stdout[-2000:]
    [pages] = re.findall(r"Output written on \S+ \((\d+) page", result.stdout)
    assert int(pages) <= MOST_PAGES
    read = subprocess.run(
        ["pdftotext", "-raw", f"{name}.pdf", "-"], cwd=appendices, capture_output=True, text=True, check=True
    )
    words = " ".join(read.stdout.split())
    assert len(commands()) == 9
    for each in commands():
        assert each in words, each
