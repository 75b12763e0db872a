"""Artifact appendices: LaTeX that is whole, with every claim that can be tried."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from report_runs import ROOT

from lowband.evidence.claims.claim import read_claims
from lowband.evidence.claims.experiments import read_experiments
from lowband.evidence.report.appendix import APPENDICES, write_appendices
from lowband.evidence.report.claim_views import write_claims
from lowband.evidence.report.writers import latex_text

CONFIG = ROOT / "config"


@pytest.fixture(scope="module")
def appendices(all_tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("appendices")
    write_claims(CONFIG / "claims.yaml", all_tables, folder, root=ROOT)
    write_appendices(folder / "claims.csv", CONFIG, folder)
    return folder


@pytest.mark.parametrize("name", APPENDICES)
def test_an_appendix_is_whole(name: str, appendices: Path) -> None:
    text = (appendices / f"{name}.tex").read_text()
    opened, closed = (re.findall(rf"\\{word}{{(\w+)}}", text) for word in ("begin", "end"))
    assert sorted(opened) == sorted(closed)
    assert text.count("{") == text.count("}")
    assert not re.search(r"<%|%>|<<|>>", text)
    assert r"\input{claims}" in text


@pytest.mark.parametrize("name", ["sc", "eurosys"])
def test_an_appendix_has_every_claim_that_has_an_experiment(name: str, appendices: Path) -> None:
    text = (appendices / f"{name}.tex").read_text()
    experiments = read_experiments(CONFIG)
    for claim in read_claims(CONFIG / "claims.yaml"):
        if experiments[claim.experiment].command:
            assert latex_text(claim.sentence) in text, claim.id


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
@pytest.mark.parametrize("name", APPENDICES)
def test_an_appendix_can_be_set(name: str, appendices: Path) -> None:
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", f"{name}.tex"]
    result = subprocess.run(command, cwd=appendices, capture_output=True, text=True, errors="replace")
    assert result.returncode == 0, result.stdout[-2000:]
