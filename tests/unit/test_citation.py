"""CITATION.cff has what CFF 1.2.0 requires, and names the papers at the core, and the package's version."""

import re
import tomllib

import yaml

import lowband
from tests.checkout import ROOT

TYPES = {"article", "conference-paper"}


def test_citation_is_valid() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "license", "version"} <= set(citation)
    assert citation["type"] == "software"
    assert all({"name"} & set(author) or {"family-names"} <= set(author) for author in citation["authors"])
    preferred = citation["preferred-citation"]  # the artifact; the papers are references beside it
    assert preferred.keys() == {"type", "title", "version", "license", "authors", "notes"}
    assert all(preferred[key] == citation[key] for key in ("type", "title", "version", "license", "authors"))
    assert "arXiv:2501.04266" in preferred["notes"]
    for reference in citation["references"]:
        assert {"type", "title", "authors"} <= set(reference)
        assert reference["type"] in TYPES


def test_citation_names_the_papers() -> None:
    text = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    for paper in ("2501.04266", "2306.10209", "2307.08691", "2001.04438"):
        assert f"arXiv:{paper}" in text


def test_one_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" in project["dynamic"]  # setuptools reads it from the package
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert newest is not None
    assert newest[1] == str(citation["version"]) == lowband.__version__
    assert citation["license"] == project["license"]
