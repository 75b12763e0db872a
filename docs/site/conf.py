"""The site: pages of this repository and the reference of `lowband.__all__`, readable without a network.

`make site` builds it into build/site. The source folder is the repository, so links between pages work as in
it. Links to other files of the repository become text, because a copy of the site does not have them.
"""

import re
import shutil
from pathlib import Path

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

import lowband
from lowband.__main__ import command_line

ROOT = Path(__file__).parents[2]

project, release = "lowband", lowband.__version__
copyright = "the authors of lowband, Apache-2.0"
extensions = ["myst_parser", "sphinx.ext.autodoc"]
root_doc = "README"
exclude_patterns = [".*", "build", "results", "src", "tests", "figures", "workflow"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"lowband {release}"
html_copy_source = html_show_sphinx = smartquotes = False
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the docstrings say what an argument is

# The pages in their order.
PAGES = {
    "Use": [
        "docs/first-hour", "docs/library", "docs/parallel", "docs/tensor-and-pipeline", "docs/context",
        "docs/experts", "docs/tiers", "docs/low-communication", "docs/jobs-that-join",
        "docs/site/api", "docs/site/verbs", "docs/predictor", "docs/predictor-model", "docs/running",
        "docs/sites", "docs/reliability",
    ],
    "Results": [
        "docs/status", "docs/claims", "docs/benchmarks", "docs/peers", "docs/scale-model",
        "docs/low-communication-measured", "docs/predictor-errors", "docs/kernels", "docs/softmax-cpu",
        "docs/flops", "docs/reading-the-report",
    ],
    "Keep": [
        "docs/design", "docs/adding", "CONTRIBUTING", "config/README", "docs/testing", "docs/words",
        "CHANGELOG",
    ],
}  # fmt: skip

_pages = {root_doc, *(page for part in PAGES.values() for page in part)}
include_patterns = [f"{page}.*" for page in _pages]

LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])+)\]\((?P<target>[^)#\s]+)(?P<anchor>#[^)]*)?\)")
ITEM = re.compile(r"(?P<names>\w+(?:, \w+)*):\s+(?P<text>\S.*)")


def _read(_app: Sphinx, page: str, source: list[str]) -> None:
    """Unlink what is no page, and give the first page the list of all."""
    if page == root_doc:
        trees = (
            "\n".join(["```{toctree}", f":caption: {caption}", ":hidden:", *(f"/{p}" for p in pages), "```"])
            for caption, pages in PAGES.items()
        )
        source[0] += "\n\n" + "\n\n".join(trees)
    folder = (ROOT / page).parent

    def unlinked(found: re.Match[str]) -> str:
        path = (folder / found["target"]).resolve()
        is_ours = path.exists() and path.is_relative_to(ROOT)
        is_other = is_ours and str(path.relative_to(ROOT).with_suffix("")) not in _pages
        return found["text"] if is_other else found[0]  # Sphinx reports what does not exist

    source[0] = LINK.sub(unlinked, source[0])


def _docstring(
    _app: Sphinx, _what: str, _name: str, _object: object, _options: object, lines: list[str]
) -> None:
    """Give this repository's docstrings the marks of reStructuredText: lists of arguments, and examples."""
    paragraphs = "\n".join(lines).rstrip().split("\n\n")
    lines[:] = [line for text in paragraphs for line in [*_paragraph(text.splitlines()), ""]]


def _paragraph(text: list[str]) -> list[str]:
    if all(line.startswith("    ") for line in text):
        return [".. code-block:: python", "", *text]
    marked: list[str] = []
    for line in text:
        if item := ITEM.fullmatch(line):
            marked.append(f":param {item['names']}: {item['text']}")
        elif marked and marked[0].startswith(":param"):
            if line.startswith(" "):
                marked[-1] += f" {line.strip()}"
            else:
                marked += ["", line]
        else:
            marked.append(line)
    return marked


class Verbs(Directive):
    """The help of each verb of the command line."""

    def run(self) -> list[nodes.Node]:
        sections = []
        for name, parser in command_line()[1].items():
            section = nodes.section(ids=[f"lowband-{name}"], names=[name])
            section += nodes.title(text=name)
            section += nodes.literal_block(text=parser.format_help(), language="text")
            sections.append(section)
        return sections


def _finish(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.name == "html":
        shutil.copy(Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html"))


def setup(app: Sphinx) -> None:
    app.add_directive("lowband-verbs", Verbs)
    app.connect("source-read", _read)
    app.connect("autodoc-process-docstring", _docstring)
    app.connect("build-finished", _finish)
