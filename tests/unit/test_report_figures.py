"""Figures: the same table gives the same bytes, and beside each lies what it shows and where that is from."""

import shutil
from pathlib import Path

import pytest
from report_runs import smoke_specs, write_failure, write_softmax

from lowband.errors import UserError
from lowband.evidence.report import figures
from lowband.evidence.report.claim_views import write_claims
from lowband.evidence.report.figures import FIGURES, write_figure
from lowband.evidence.report.figures.style import looks
from lowband.evidence.tables.build import write_table
from lowband.evidence.tables.collect import collect
from lowband.evidence.tables.entries import TABLES
from lowband.evidence.validation.tables import PREDICTED
from lowband.spec.csv_tables import read_table
from tests.drawn_figures import check_origin, check_print

ROOT = Path(__file__).parents[2]


# Of the runs' own tables. The others are looked at as tests/workflow/test_shipped.py draws them.
OF_RUNS = ("scaling", "communication", "memory", "loss")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in OF_RUNS else [pytest.mark.wide]) for name in FIGURES],
)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def drawn(name: str, all_tables: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one figure, drawn from the tables."""
    folder = tmp_path_factory.mktemp(name)
    write_figure(name, all_tables, folder)
    return folder


def test_drawn_twice_gives_the_same_bytes(name: str, drawn: Path, all_tables: Path, tmp_path: Path) -> None:
    write_figure(name, all_tables, tmp_path)
    for kind in ("pdf", "svg", "png", "csv"):
        first, second = (folder / f"{name}.{kind}" for folder in (drawn, tmp_path))
        assert first.read_bytes() == second.read_bytes(), kind


def test_a_publisher_can_print_it(name: str, drawn: Path) -> None:
    check_print(drawn, name)


def test_says_what_it_was_drawn_from(name: str, drawn: Path, all_tables: Path) -> None:
    check_origin(drawn, name, all_tables)


def test_nothing_measured_is_said_in_the_figure(
    all_tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures, "PNG_DPI", 30)  # nobody looks at these
    for predicted in PREDICTED:  # what no run is needed for
        shutil.copy(all_tables / f"{predicted}.csv", tmp_path)
    for shipped in ("kernels/compiled.csv", "box-bench/comm.csv", "box-bench/jobs.csv"):  # likewise
        shutil.copy(ROOT / "results" / "reference" / shipped, tmp_path)
    collect([write_failure(tmp_path, spec, None) for spec in smoke_specs()], tmp_path)
    write_softmax(tmp_path, {})
    for table in TABLES:
        write_table(table, tmp_path)
    write_claims(ROOT / "config" / "claims.yaml", tmp_path, tmp_path, root=ROOT)
    said = set()
    for name in FIGURES:
        write_figure(name, tmp_path, tmp_path / "figures")
        svg = (tmp_path / "figures" / f"{name}.svg").read_text()  # a comment in it repeats each text
        is_said = f"{FIGURES[name].table}.csv has no row to draw" in svg
        assert is_said == read_table(tmp_path / "figures" / f"{name}.csv").empty, name
        said |= {name} if is_said else set()
    assert {"scaling", "memory", "communication"} <= said


def test_schemes_look_different_and_keep_their_look() -> None:
    names = ["ddp", "zero1", "zero2", "zero3", "hpz", "hsdp", "hier3-exact", "mine", "yours", "another"]
    all_of_them = looks(names)
    assert len(set(all_of_them.values())) == len(names)
    assert looks(["zero3", "hpz"])["hpz"] == all_of_them["hpz"]


def test_an_unknown_figure_is_refused(all_tables: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no figure 'nope'") as error:
        write_figure("nope", all_tables, tmp_path)
    assert "scaling" in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_figure_never_overwrites_its_table(all_tables: Path) -> None:
    before = (all_tables / "memory.csv").read_bytes()
    with pytest.raises(UserError, match="would overwrite its table"):
        write_figure("memory", all_tables, all_tables)
    assert (all_tables / "memory.csv").read_bytes() == before
