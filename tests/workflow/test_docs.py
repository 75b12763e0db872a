"""docs/adding.md, followed as written in a copy of the tree: blocks go where they say, commands run."""

import re
import shlex
from pathlib import Path

import pytest
import trees
import yaml
from trees import copy_tree

from lowband.spec.csv_tables import read_table
from tests.called import called
from tests.checkout import ROOT

BLOCK = re.compile(r"```(?P<info>[^\n]*)\n(?P<text>.*?)```", re.DOTALL)
LINES = re.compile(r"^(?P<verb>append|file|insert)=(?P<path>\S+)$")


@pytest.mark.usefixtures("warm_training")
def test_adding_as_written(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    commands = 0
    for block in BLOCK.finditer((ROOT / "docs" / "adding.md").read_text()):
        words = block["info"].split()
        if not words:
            for command in block["text"].strip().splitlines():
                run(command, tmp_path)
                commands += 1
            continue
        if words[-1] == "program":  # tests/unit/test_adding_programs.py runs these
            continue
        place = LINES.match(words[-1])
        assert place, block["info"]
        put(tmp_path / place["path"], place["verb"], block["text"])
    assert commands >= 5
    _check_a_paper_of_your_own(tmp_path)


def _check_a_paper_of_your_own(tree: Path) -> None:
    """The page has its claims, machine and runs, and nothing that is shipped; the figure what is reported."""
    results, figures = tree / "results" / "mine", tree / "figures" / "mine"
    claims = read_table(results / "tables" / "claims.csv").set_index("id")
    drawn = read_table(figures / "reported.csv").set_index("id")
    assert list(claims.index) == list(drawn.index) == ["hsdp-bytes", "hsdp-memory"]
    assert list(drawn["reported"]) == [0.7, 1.3]
    assert set(claims["origin"]) == {"this run"}
    held = read_table(results / "tables" / "states.csv").groupby("scheme")["held_bytes"].sum()
    assert drawn.loc["hsdp-memory", "ours"] == held["hsdp"] / held["zero3"]
    page = (results / "page.html").read_text()
    assert page.index('id="claims"') < page.index("HSDP / ZeRO-3 - bytes") < page.index('id="machine"')
    assert re.findall(r"<h3>(\w+)</h3>\n<p", page) == ["zero3", "hsdp"]
    assert not re.search(r"[Ss]hipped|Frontier|hier3|2501\.04266", page)


def put(path: Path, verb: str, text: str) -> None:
    """`insert`: after the block's first line, which stands in the file."""
    if verb == "file":
        assert not path.exists()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    elif verb == "append":
        path.write_text(path.read_text() + "\n" + text)
    else:
        anchor = text.splitlines(keepends=True)[0]
        assert path.read_text().count(anchor) == 1, anchor
        path.write_text(path.read_text().replace(anchor, text))


def run(command: str, tree: Path) -> None:
    program, *arguments = shlex.split(command)
    result = called(trees.python(), "-m", program, *arguments, cwd=tree, tree=tree, timeout=None)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"


def test_every_key_of_the_configuration_is_described() -> None:
    schema = yaml.safe_load((ROOT / "workflow" / "schemas" / "config.schema.yaml").read_text())
    config = yaml.safe_load((ROOT / "config" / "config.yaml").read_text())
    assert set(schema["properties"]) == set(config) == set(schema["required"])
    assert all(key["description"] for key in schema["properties"].values())
