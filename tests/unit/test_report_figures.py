"""Figures: the same table gives the same bytes, and beside each lies what it shows and where that is from."""

import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure
from report_runs import smoke_specs, write_failure, write_softmax

from lowband.errors import UserError
from lowband.evidence.report.claim_views import write_claims
from lowband.evidence.report.figures import FIGURES, READING, Entry, lay_out, scaling, write_figure
from lowband.evidence.report.figures.style import (
    POINTS,
    End,
    canvas,
    in_order,
    label_ends,
    looks,
    paper_style,
)
from lowband.evidence.tables.build import write_table
from lowband.evidence.tables.collect import collect
from lowband.evidence.tables.entries import COLLECTED, TABLES
from lowband.evidence.validation.tables import PREDICTED
from lowband.spec.csv_tables import read_table
from tests.checkout import CONFIG, REFERENCE, ROOT
from tests.drawn_figures import check_origin, check_print, check_width
from tests.refused import refusal

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


def test_a_solution_that_differs_in_its_last_bits_is_drawn_in_the_same_place() -> None:
    figure = Figure()
    axes = figure.add_axes((0.1 + 0.2, 0.1, 0.5, 0.5))
    lay_out(figure)
    assert axes.get_position().x0 == 0.3 != 0.1 + 0.2


def test_a_publisher_can_print_it(name: str, drawn: Path) -> None:
    check_print(drawn, name)
    check_width(drawn, name)


def test_says_what_it_was_drawn_from(name: str, drawn: Path, all_tables: Path) -> None:
    check_origin(drawn, name, all_tables)


def test_nothing_measured_is_said_in_the_figure(
    all_tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """And in no other: figures of shipped and predicted rows, which are drawn with --wide."""
    save = Figure.savefig

    def only_svg(figure: Figure, path: Path, **options: Any) -> None:
        if path.suffix == ".svg":
            save(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", only_svg)  # nobody looks at the others
    for predicted in PREDICTED:  # what no run is needed for
        shutil.copy(all_tables / f"{predicted}.csv", tmp_path)
    for shipped in ("kernels/compiled.csv", "box-bench/comm.csv", "box-bench/jobs.csv"):  # likewise
        shutil.copy(REFERENCE / shipped, tmp_path)
    collect([write_failure(tmp_path, spec, None) for spec in smoke_specs()], tmp_path)
    write_softmax(tmp_path, {})
    for table in TABLES:
        write_table(table, tmp_path)
    write_claims(ROOT / "config" / "claims.yaml", tmp_path, tmp_path, root=ROOT)
    said = set()
    of_runs = {name for name, table in TABLES.items() if {*table.sources} & {*COLLECTED}}
    for name, entry in FIGURES.items():
        is_of_runs = entry.table in of_runs or read_table(tmp_path / f"{entry.table}.csv").empty
        if not (is_of_runs or request.config.getoption("--wide")):
            continue
        write_figure(name, tmp_path, tmp_path / "figures")
        svg = (tmp_path / "figures" / f"{name}.svg").read_text()  # a comment in it repeats each text
        is_said = f"{entry.table}.csv has no row to draw" in svg
        assert is_said == read_table(tmp_path / "figures" / f"{name}.csv").empty, name
        said |= {name} if is_said else set()
    assert {"scaling", "memory", "communication"} <= said


def test_schemes_look_different_and_keep_their_look() -> None:
    names = ["ddp", "zero1", "zero2", "zero3", "hpz", "hsdp", "hier3-exact", "mine", "yours", "another"]
    all_of_them = looks(names)
    assert len(set(all_of_them.values())) == len(names)
    assert looks(["zero3", "hpz"])["hpz"] == all_of_them["hpz"]


def test_schemes_stand_as_in_their_file() -> None:
    names = list(CONFIG.schemes)
    placed = [name for name in names if name in in_order(names)[: names.index("planned") + 1]]
    assert in_order(reversed(names))[: len(placed)] == placed == names[: len(placed)]


def test_ranks_on_shared_cores_have_no_efficiency_in_the_figure(all_tables: Path, tmp_path: Path) -> None:
    """The same points on devices with a peak have one; a point alone is compared with nothing."""
    df = scaling.data(read_table(all_tables / "scaling.csv"))
    with paper_style():
        shared = labels(scaling.draw(df))
        own = labels(scaling.draw(df.assign(peak_flop_per_s_per_rank=1e12)))
        alone = scaling.draw(df[(df["scheme"] == "zero3") & (df["ranks"] == 8)])
    assert "efficiency" not in shared
    assert "seconds of a step, 8 ranks" in shared
    assert "efficiency" in own
    assert not alone.axes


def labels(figure: Figure) -> str:
    return "; ".join(name for axes in figure.axes for name in (axes.get_xlabel(), axes.get_ylabel()))


def test_labels_of_lines_that_end_together_stand_apart() -> None:
    with paper_style():
        axes = canvas(3, 2).subplots()
        axes.set_ylim(0, 1)
        label_ends(axes, [End(name, 1, 0.01, "0.2") for name in "abc"], 2)
        heights = sorted(text.xyann[1] for text in axes.texts)
    assert heights[0] >= 0
    assert min(b - a for a, b in pairwise(heights)) * 2 * 72 >= POINTS - 0.01


def test_an_unknown_figure_is_refused(all_tables: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no figure 'nope'") as error:
        write_figure("nope", all_tables, tmp_path)
    assert "scaling" in str(error.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("drawn_by", "line"),
    [
        ("", "figures.yaml: mine: no file lowband/evidence/report/figures/mine.py (allowed: "),
        ("wan:nope", "figures.yaml: mine: no 'nope' in report.figures.wan (allowed: "),
        ("style", "figures.yaml: mine: no '' in report.figures.style (allowed: "),
    ],
)
def test_a_figure_without_its_code_is_refused_in_one_line(
    drawn_by: str, line: str, all_tables: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FIGURES, "mine", Entry(name="mine", table="box", caption="c", drawn_by=drawn_by))
    assert refusal(write_figure, "mine", all_tables, tmp_path).startswith(line)
    assert not list(tmp_path.iterdir())


def test_a_figure_never_overwrites_its_table(all_tables: Path) -> None:
    before = (all_tables / "memory.csv").read_bytes()
    with pytest.raises(UserError, match="would overwrite its table"):
        write_figure("memory", all_tables, all_tables)
    assert (all_tables / "memory.csv").read_bytes() == before


def test_hier3_is_said_to_be_our_reading_where_it_is_drawn() -> None:
    with_it, without = (
        pd.DataFrame({"scheme": ["zero3", name], "ranks": [1, 2]}) for name in ("hier3", None)
    )
    caption = FIGURES["scaling"].caption_of(without)
    assert FIGURES["scaling"].caption_of(with_it) == f"{caption} {READING}"
    assert READING in FIGURES["pareto"].caption_of(without)  # its words name hier3
    assert READING in FIGURES["frontier_map"].caption_of(pd.DataFrame({"ratio_hier3_zeropp": [1.0]}))
    assert not any("{" in entry.worded(shows_hier3=True) for entry in FIGURES.values())
