"""The site: built strictly, complete, and read without a network."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import browser
import pytest

import lowband
from lowband.__main__ import command_line
from tests.called import called
from tests.checkout import ROOT

pytest.importorskip("sphinx", reason="pip install -e '.[site]'")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as `make site` builds it."""
    line = next(line for line in (ROOT / "Makefile").read_text().splitlines() if "-m sphinx" in line)
    folder = tmp_path_factory.mktemp("site")
    arguments = line.partition("-m sphinx")[2].replace("build/site", str(folder)).split()
    done = called(sys.executable, "-m", "sphinx", *arguments, timeout=1200)
    assert done.returncode == 0, done.stderr
    return folder


class Page(HTMLParser):
    """A page's ids, the pages and files that it links to, and what it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = {key: value or "" for key, value in attrs}
        self.ids.add(of.get("id", ""))
        if tag == "a" and "href" in of:
            self.links.append(of["href"])
        elif tag in ("script", "img", "iframe") and "src" in of:
            self.loads.append(of["src"])
        elif tag == "link" and of.get("rel") in ("stylesheet", "icon", "preload"):
            self.loads.append(of["href"])


def test_every_document_and_every_public_name_is_in_it(site: Path) -> None:
    for document in [*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")]:
        assert (site / document.relative_to(ROOT).with_suffix(".html")).is_file(), document.name
    reference = Page(site / "docs/site/api.html").ids
    assert {f"lowband.{name}" for name in lowband.__all__} <= reference
    assert {"lowband.Topology.from_cluster", "lowband.Checkpointer.save"} <= reference
    assert {f"lowband-{verb}" for verb in command_line()[1]} <= Page(site / "docs/site/verbs.html").ids


def test_links_lead_somewhere_and_nothing_comes_from_a_network(site: Path) -> None:
    pages = {path: Page(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for link in page.links + page.loads:
            target, _, anchor = unquote(link).partition("#")
            if re.match(r"(https?:|mailto:|//)", target):
                assert link not in page.loads, (path.name, link)
                continue
            found = (path.parent / target.partition("?")[0]).resolve() if target else path
            assert found.is_file(), (path.name, link)
            assert not anchor or found not in pages or anchor in pages[found].ids, (path.name, link)
        style = (path.parent / load.partition("?")[0] for load in page.loads if ".css" in load)
        assert not any(re.search(r"(url\(|@import)\s*['\"]?(https?:)?//", css.read_text()) for css in style)


@pytest.mark.skipif(browser.CHROMIUM is None, reason="no browser: make page-deps")
def test_a_browser_shows_the_reference(site: Path, tmp_path: Path) -> None:
    seen = browser.look_at(site / "docs/site/api.html", 390, tmp_path)
    assert seen["scroll"] <= seen["width"] + 1
    assert seen["missing"] == []
    assert all(name.startswith("file:") for name in seen["fetched"])
    assert not [line for line in seen["console"] if "ERROR" in line.upper()]
