"""The page and its drawings, without a browser (tests/workflow/test_shipped.py has one)."""

import re
from pathlib import Path

import pytest

from lowband.errors import UserError
from lowband.evidence.claims.claim import PAPERS
from lowband.evidence.report.figures import FIGURES
from lowband.evidence.report.page import _schemes, write_page
from lowband.evidence.report.page.machine import draw_machine, links
from lowband.evidence.report.page.schemes import CELL, TALL, draw_scheme, exchanges, part, wires
from lowband.spec.files import write_whole
from lowband.spec.mesh import Levels
from lowband.spec.plain_data import read_yaml
from tests.checkout import CONFIG, ROOT

CLUSTERS = sorted(path.parent.name for path in (ROOT / "slurm").glob("*/machine.yaml"))
SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="252pt" height="72pt"><g id="text_1"/></svg>'


def drawn(tables: Path, figures: Path) -> None:
    """Every figure, empty, with the rows of its table."""
    for name, entry in FIGURES.items():
        (figures / f"{name}.svg").write_text(SVG)
        (figures / f"{name}.json").write_text('{"caption": "Below it."}')
        (figures / f"{name}.csv").write_bytes((tables / f"{entry.table}.csv").read_bytes())


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_every_machine_can_be_drawn(cluster: str) -> None:
    machine = CONFIG.machine(cluster)
    drawn = draw_machine(machine)
    for level in machine.levels:
        assert (level.name if level.size is not None else "between nodes") in drawn
    assert drawn.count('class="rank"') == 2 * machine.node_size
    assert len(links(machine)) == sum(level.link is not None for level in machine.levels)


def test_links_say_how_much_slower() -> None:
    rows = links(CONFIG.machine("frontier"))
    assert list(rows["level"]) == ["package", "node", "world"]
    assert list(rows["slower"]) == ["1 x", "4 x", "16 x"]


@pytest.mark.parametrize(
    ("scheme", "heights"),
    # Of weights and optimizer, on two nodes of 8: the share of a cell that is filled.
    [("ddp", (1, 1)), ("zero1", (1, 1 / 16)), ("hsdp", (1 / 8, 1 / 8)), ("hier3", (1 / 2, 1 / 16))],
)
def test_a_cell_is_filled_as_far_as_its_rank_holds(scheme: str, heights: tuple[float, float]) -> None:
    drawn = draw_scheme(CONFIG.scheme(scheme), {"package": 2, "node": 8})
    filled = re.findall(rf'<rect [^>]*width="{CELL}" height="([\d.]+)" fill="(#\w+)"', drawn)
    for color, share in zip(("#0173b2", "#029e73"), heights, strict=True):
        assert {float(height) for height, fill in filled if fill == color} == {share * TALL}
    assert drawn.count('class="cell"') == 4 * 16


def test_a_state_s_slice_lies_within_the_one_before_it() -> None:
    levels = Levels.fit({"package": 2, "node": 8}, 16)
    for rank in range(16):
        outer_top, outer_height = 0.0, 16.0
        for level in ("package", "node", "world"):
            top, height = part(levels, level, rank, 16)
            assert outer_top <= top < top + height <= outer_top + outer_height
            outer_top, outer_height = top, height
    assert [part(levels, "node", rank, 16)[0] for rank in range(4)] == [0, 8, 2, 10]


def test_wires_are_named() -> None:
    assert wires(CONFIG.scheme("zero3")) == "all native"
    assert wires(CONFIG.scheme("zeropp")) == "forward gather int8, grad reduce int4"


def test_no_two_cards_have_the_same_picture() -> None:
    placements, left_out = _schemes(CONFIG, CONFIG.schemes, "frontier")
    pictures = [card["svg"].split("</title>")[1] for card in placements]  # the title names the first scheme
    assert len(set(pictures)) == len(pictures) < len(CONFIG.schemes)
    shown = [scheme.name for card in placements for scheme, _, _ in card["schemes"]]
    assert sorted(shown) == sorted(CONFIG.schemes)
    assert not left_out


def test_cards_of_replicas_say_how_they_exchange() -> None:
    assert exchanges(CONFIG.scheme("zero3")) == ""
    said = {exchanges(CONFIG.scheme(name)) for name in ("local-sgd", "slowmo", "diloco", "streaming-diloco")}
    assert len(said) == 4
    assert all(re.match(r"Replicas beyond node exchange weights every \d+ steps", each) for each in said)


def test_a_page_of_a_few_runs(all_tables: Path, tmp_path: Path) -> None:
    drawn(all_tables, tmp_path)
    write_page(ROOT, all_tables, tmp_path, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "No run of this reproduction is at the scale of the paper" in page
    # The first screen answers: a sentence for each badge, five contributions, findings, then each paper's
    # claims, this run's apart from shipped ones.
    found = page[page.index('id="found"') : page.index('id="machine"')]
    assert found.count("<li>") == 5
    assert "neither reproduced nor refuted" in found
    verdict = page[page.index('id="verdict"') : page.index('id="found"')]
    assert page.index("<h1>") < page.index('id="verdict"') < page.index("<nav") < page.index("<main>")
    assert re.findall(r"<strong>(\w+): ", verdict) == ["Available", "Functional", "Reproduced"]
    assert "<code>make smoke</code>" in verdict
    assert verdict.count("<tr>") == 1 + 5
    assert all(paper in found for paper in PAPERS.values())
    assert "<th>this run</th><th>shipped</th><th>computed</th>" in found
    # The constants in force stand beside the alternatives: they are those of no row.
    shares = read_yaml(ROOT / "config" / "stacks" / "deepspeed-zero.yaml")["at"]["frontier"]["efficiency"]
    node, world = (shares[level]["value"] for level in ("node", "world"))
    assert f"config/stacks/deepspeed-zero.yaml</code>:\nnode {node}, world {world}.\n" in page
    # Between the measured and the predicted figure that disagree stands why.
    places = [
        page.index(f'id="{name}"')
        for name in ("figure-box", "figure-frontier_map", "disagree", "figure-scale")
    ]
    assert places == sorted(places)
    names = re.findall(r' id="([^"]+)"', page)
    assert len(names) == len(set(names))
    assert all(f'id="figure-{name}"' in page for name in FIGURES)
    targets = re.findall(r'href="#([^"]+)"', page)
    assert targets
    assert set(targets) <= set(names)


RACKS = """description: two racks of nodes
device: {name: a GPU, source: made up}
levels: [{name: package, size: 2}, {name: node, size: 4}, {name: rack, size: 8}, {name: world}]
"""


def test_schemes_whose_levels_the_drawn_machine_lacks(all_tables: Path, tmp_path: Path) -> None:
    """One has them on another machine, whose racks are drawn; of the other's levels there is no machine."""
    drawn(all_tables, tmp_path)
    root = tmp_path / "root"
    for folder in ("config", "slurm"):
        (root / folder).mkdir(parents=True)
        for path in (ROOT / folder).iterdir():
            if path.name != "schemes":  # what `lowband plan --write` has left there
                (root / folder / path.name).symlink_to(path)
    for name in ("results", "CITATION.cff"):
        (root / name).symlink_to(ROOT / name)
    four = "secondary: package\nweights: node\ngrads: rack\noptim: world\n"
    write_whole(root / "slurm" / "racks" / "machine.yaml", RACKS)
    write_whole(root / "config" / "schemes" / "hier4.yaml", four)
    write_whole(root / "config" / "schemes" / "podded.yaml", four.replace("rack", "pod"))
    write_page(root, all_tables, tmp_path, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    card = page[page.index("<h3>hier4</h3>") :]
    card = card[: card.index("Wires:")]
    assert "this is on racks, two groups of its level rack" in card
    assert card.count('class="cell"') == 4 * 16
    assert "no machine in slurm/ has these levels: podded (node, package, pod)." in page
    assert "<h3>podded</h3>" not in page
    assert "two groups of its level" not in page[: page.index("<h3>hier4</h3>")]  # all others: as Frontier


def test_a_figure_that_was_not_drawn_is_told(all_tables: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such figure"):
        write_page(ROOT, all_tables, tmp_path, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
