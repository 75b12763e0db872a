"""Everything redrawn from the shipped measurements, once, in the environment that `make figures` makes; then
each thing that it made."""

import functools
import getpass
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import browser
import IPython.display
import pytest
import trees
from crates import few_of_each_kind
from rocrate.rocrate import ROCrate
from rocrate_validator import services
from rocrate_validator.utils.http import HttpRequester
from together import NOT_SHIPPED, WHOLE
from trees import PLAIN, copy_tree, planned, snakemake

from lowband.evidence.report.documents.code import claims
from lowband.evidence.report.figures import FIGURES, write_figure
from lowband.evidence.report.provenance import METADATA
from lowband.evidence.validation.tables import PREDICTED
from lowband.spec.csv_tables import read_table
from tests import environments
from tests.checkout import ROOT
from tests.drawn_figures import check_origin, check_print, check_width
from tests.interpreter import Warm
from tests.predictions import assert_is_shipped

SHIPPED = ("--config", "measurements=shipped", "results=shipped")
NOTEBOOKS = sorted(path.stem for path in (ROOT / "workflow" / "notebooks").glob("*.ipynb"))
EXECUTED = "kernels"  # by the workflow without --wide
SET_UP = ("Makefile", "README.md", "pyproject.toml")


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree before `make figures`."""
    return copy_tree(tmp_path_factory.mktemp("shipped"))


@functools.cache
def unreachable() -> str:
    """Why pip can install nothing here; "" where it can."""
    pins = (ROOT / "envs" / "constraints.txt").read_text().splitlines()
    [pin] = [line for line in pins if line.startswith("pydantic==")]
    with TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, pin]
        asked = subprocess.run(pip, capture_output=True, text=True)
    return asked.stderr.strip().splitlines()[-1] if asked.returncode else ""


@pytest.fixture(scope="module")
def python(empty: Path, request: pytest.FixtureRequest) -> Path:
    """The interpreter of an environment with nothing but what `make figures` installs: links to what is
    installed here, and with --wide truly installed, where it can be."""
    if request.config.getoption("--wide") and not unreachable():
        for name in SET_UP:
            shutil.copy2(ROOT / name, empty)
        command = ["make", "-C", str(empty), f"PYTHON={sys.executable}", ".venv-report/.installed"]
        subprocess.run(command, check=True)
        return empty / ".venv-report" / "bin" / "python"
    return environments.made(empty / ".venv-report", *environments.REPORT)


@pytest.fixture(scope="module", autouse=True)
def commands(python: Path, warm: Warm | None) -> Iterator[None]:
    """All of the workflow are that interpreter's."""
    with Warm(python) as program, pytest.MonkeyPatch.context() as patch:
        if warm is not None:
            program.serve("plain", *PLAIN)
        patch.setattr(trees, "python", lambda: str(program.path if warm else python))
        yield


@pytest.fixture(scope="module")
def tree(empty: Path, python: Path, request: pytest.FixtureRequest) -> Path:
    """The tree after `make figures`. Its tables and figures are made in one process, by the commands that the
    workflow shows, and it has one notebook, as each starts a kernel; with --wide all is made by the workflow,
    in a process each.
    """
    are_together = not request.config.getoption("--wide")
    if are_together:
        for name in {*NOTEBOOKS} - {EXECUTED}:
            (empty / "workflow" / "notebooks" / f"{name}.ipynb").unlink()
        _make_together(empty)
    result = snakemake(empty, *SHIPPED)
    assert result.returncode == 0, result.stderr[-4000:]
    assert are_together != ({"table", "figure", "predict"} <= set(planned(result)))
    return empty


def _make_together(tree: Path) -> None:
    shown = snakemake(tree, "-n", "-p", *SHIPPED)
    assert shown.returncode == 0, shown.stderr[-4000:]
    raw = snakemake(tree, "--until", "shipped", *SHIPPED)
    assert raw.returncode == 0, raw.stderr[-4000:]
    env = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{Path(__file__).parent}"}
    command = [trees.python(), "-m", "together"]
    made = subprocess.run(command, input=shown.stdout, cwd=tree, env=env, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr[-4000:]


@pytest.fixture(scope="module")
def results(tree: Path) -> Path:
    return tree / "results" / "shipped"


@pytest.mark.wide
def test_the_environment_is_installed(empty: Path, python: Path) -> None:
    if unreachable():
        pytest.skip(f"nothing can be installed here: {unreachable()}")
    assert (empty / ".venv-report" / ".installed").is_file()


def test_everything_is_there(tree: Path, results: Path) -> None:
    kinds = {".pdf", ".svg", ".png", ".csv", ".json"}
    drawn = {path.name for path in (tree / "figures" / "shipped").iterdir()}
    assert drawn == {f"{figure}{kind}" for figure in FIGURES for kind in kinds}
    assert {path.name for path in results.glob("tables/claims.*")} == {
        f"claims.{kind}" for kind in ("csv", "md", "tex", "html")
    }
    assert (results / "appendix" / "eurosys.tex").stat().st_size > 0
    assert planned(snakemake(tree, "-n", *SHIPPED)) == {}  # a second run has nothing to do


def test_the_documents_show_these_verdicts(results: Path) -> None:
    assert "\n".join(claims(results / "tables", ROOT)) in (ROOT / "docs" / "claims.md").read_text()
    by_kind = (results / "tables" / "claims.md").read_text().split("\n\n")[1]
    assert by_kind in (ROOT / "README.md").read_text()


@pytest.mark.wide
def test_predictions_are_the_shipped_ones(results: Path) -> None:
    """Unit tests take these for what the predictor says."""
    for name in {*PREDICTED} - {NOT_SHIPPED}:
        assert_is_shipped(read_table(results / "tables" / f"{name}.csv"), name)


@pytest.mark.parametrize("name", ["box_accumulation.csv", "box_ratios.csv", "wan.csv"])
def test_pictures_in_documents_are_the_shipped_figures(name: str, tree: Path) -> None:
    """Their data: the drawing may differ in the fonts that a machine has. figures/README.md shows all."""
    assert f"](../docs/figures/{Path(name).stem}.svg)" in (ROOT / "figures" / "README.md").read_text()
    assert (ROOT / "docs" / "figures" / name).with_suffix(".svg").is_file()
    assert (ROOT / "docs" / "figures" / name).read_text() == (tree / "figures" / "shipped" / name).read_text()


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_can_be_printed_and_says_its_origin(
    name: str, tree: Path, results: Path, request: pytest.FixtureRequest
) -> None:
    check_width(tree / "figures" / "shipped", name)
    if name in WHOLE or request.config.getoption("--wide"):
        check_print(tree / "figures" / "shipped", name)
    check_origin(tree / "figures" / "shipped", name, results / "tables")


@pytest.mark.parametrize("name", ["memory", "box"])
def test_a_figure_redrawn_elsewhere_is_the_same(name: str, tree: Path, results: Path, tmp_path: Path) -> None:
    write_figure(name, results / "tables", tmp_path)
    for kind in ("pdf", "svg", "png", "csv"):
        shipped = tree / "figures" / "shipped" / f"{name}.{kind}"
        assert shipped.read_bytes() == (tmp_path / f"{name}.{kind}").read_bytes(), kind


def test_one_claim_by_name_says_its_verdict(tree: Path) -> None:
    result = snakemake(tree, "claim_zeropp_converges", *SHIPPED)
    assert result.returncode == 0, result.stderr
    assert "| met | ZeRO++ - loss less zero3's |" in result.stdout
    rows = read_table(tree / "results" / "shipped" / "claims" / "zeropp-converges" / "claims.csv")
    assert list(rows["id"]) == ["zeropp-converges"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_shows_what_the_report_has(name: str, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code, in this process."""
    monkeypatch.chdir(tree)
    shown: list[object] = []
    monkeypatch.setattr(IPython.display, "display", lambda *parts: shown.extend(parts))
    cells = json.loads((ROOT / "workflow" / "notebooks" / f"{name}.ipynb").read_text())["cells"]
    parameters, *code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    assert "tables_dir" in parameters
    names = {"tables_dir": "results/shipped/tables", "figures_dir": "figures/shipped"}
    for source in code:
        exec(source, names)
    assert [part for part in shown if isinstance(part, IPython.display.Image)]


def test_notebooks_are_executed(tree: Path, results: Path) -> None:
    notebooks = sorted((results / "notebooks").glob("*.ipynb"))
    own = sorted(path.stem for path in (tree / "workflow" / "notebooks").glob("*.ipynb"))
    assert [path.stem for path in notebooks] == own
    assert EXECUTED in own
    for path in notebooks:
        code = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        assert all(cell["execution_count"] for cell in code), path.name
        outputs = [output for cell in code for output in cell["outputs"]]
        assert any("image/png" in output.get("data", {}) for output in outputs), path.name


def test_the_crate_holds_what_it_says(tree: Path, results: Path) -> None:
    with zipfile.ZipFile(results / "reproduction.crate.zip") as crate:
        graph = json.loads(crate.read(METADATA))["@graph"]
        entities = {entity["@id"]: entity for entity in graph}
        assert len(entities) == len(graph)
        root, run = entities["./"], entities["#run"]
        assert {"name", "description", "datePublished", "license", "mainEntity"} <= set(root)
        assert any("wfrun/workflow" in profile["@id"] for profile in root["conformsTo"])
        assert "ComputationalWorkflow" in entities[root["mainEntity"]["@id"]]["@type"]
        assert run["@type"] == "CreateAction"
        assert run["instrument"] == [root["mainEntity"], {"@id": "#src"}]
        assert "SoftwareSourceCode" in entities["#src"]["@type"]
        code = {part["@id"] for part in entities["#src"]["hasPart"]}
        assert {"src/lowband/engine/api.py", "src/lowband/kernels/softmax_cpu.c"} <= code
        assert not any("__pycache__" in path for path in code)
        files = {part["@id"] for part in root["hasPart"]}
        assert {entry["@id"] for entry in (*run["object"], *run["result"])} | code == files
        [author] = root["author"]
        assert entities[author["@id"]] == {
            "@id": author["@id"], "@type": "Organization", "name": "The lowband developers",
        }  # fmt: skip
        assert entities[run["agent"]["@id"]] == {
            "@id": "#agent",
            "@type": "Person",
            "name": getpass.getuser(),
        }
        times = [datetime.fromisoformat(run[name]) for name in ("startTime", "endTime")]
        assert times[0] <= times[1]
        assert times[0].timestamp() >= (tree / "Snakefile").stat().st_ctime - 1  # the tree was copied before
        assert files == set(crate.namelist()) - {METADATA}
        for path in files:
            assert entities[path]["sha256"] == hashlib.sha256(crate.read(path)).hexdigest()
        assert "results/shipped/page.html" in files
        assert "config/claims.yaml" in files


def test_rocrates_own_reader_reads_it(results: Path) -> None:
    crate = ROCrate(results / "reproduction.crate.zip")
    [run] = [entity for entity in crate.contextual_entities if entity.type == "CreateAction"]
    assert [instrument.id for instrument in run["instrument"]] == ["workflow/Snakefile", "#src"]
    assert run["agent"]["name"] == getpass.getuser()
    assert [author["name"] for author in crate.root_dataset["author"]] == ["The lowband developers"]


def test_the_crate_is_a_workflow_run_crate(
    results: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """No requirement of the profile is broken. `rocrate` ships the terms: no network is needed."""
    crate = results / "reproduction.crate.zip"
    if not request.config.getoption("--wide"):
        crate = few_of_each_kind(crate, tmp_path)
    context = json.loads((files("rocrate") / "data" / "ro-crate.jsonld").read_text())["@context"]
    context["ComputationalWorkflow"] = "https://bioschemas.org/ComputationalWorkflow"  # as in version 1.1
    answer = SimpleNamespace(
        status_code=200,
        links={},
        headers={"Content-Type": "application/ld+json"},
        json=lambda: {"@context": context},
    )
    monkeypatch.setattr(HttpRequester, "get", lambda *_, **__: answer, raising=False)
    settings = {
        "rocrate_uri": str(crate),
        "profile_identifier": "workflow-run-crate",
        "requirement_severity": "REQUIRED",
    }
    assert [issue.message for issue in services.validate(settings).get_issues()] == []


@pytest.mark.parametrize("kind", [pytest.param("html", marks=pytest.mark.wide), "zip"])
def test_snakemakes_own_report(kind: str, tree: Path) -> None:
    out = tree / f"report.{kind}"
    result = snakemake(tree, "--report", str(out), *SHIPPED)
    assert result.returncode == 0, result.stderr
    if kind == "zip":
        with zipfile.ZipFile(out) as archive:
            names = archive.namelist()
            assert any(name.endswith("report.html") for name in names)
            assert sum(name.endswith(".png") for name in names) == len(FIGURES)
    else:
        text = out.read_text()
        for word in ("Figures", "Claims", "Page", *FIGURES):
            assert word in text


@pytest.mark.skipif(browser.CHROMIUM is None, reason="needs Chromium: make page-deps")
@pytest.mark.parametrize("width", [360, 1200])
def test_the_page_in_a_browser(width: int, results: Path, tmp_path: Path) -> None:
    found = browser.look_at(results / "page.html", width, tmp_path)
    assert found["console"] == []
    assert found["missing"] == []
    assert found["fetched"] == []  # nothing but itself
    assert found["scroll"] <= found["width"], found["wide"]
    assert found["svgs"] > len(FIGURES)
    assert found["texts"] > 0
    assert found["overlapping"] == []
    assert found["outside"] == []


def test_the_page_needs_no_network(results: Path) -> None:
    page = (results / "page.html").read_text()
    assert "<script" not in page
    assert not [word for word in ('src="http', 'href="http', "url(http", "@import") if word in page]
