"""The ratios that a suite can decide: which runs are compared, what is predicted, what is foreseen."""

from dataclasses import replace
from pathlib import Path

import pytest

from lowband.errors import UserError
from lowband.evidence.claims.rehearsed import suite_ratios, suite_stacks
from lowband.predict.request import Grid
from lowband.predict.search.ratios import WITHIN, Ratio, Wanted, ratios, text
from lowband.spec.config import Config
from lowband.spec.suites import Decides
from tests.checkout import CONFIG

RUNS = CONFIG.runs(["frontier"])
OWN = CONFIG.given_stack(None, CONFIG.machine("frontier"))


@pytest.fixture(scope="module")
def cells() -> list[Ratio]:
    return suite_ratios(CONFIG, "frontier")


def cell(cells: list[Ratio], claim: str, **values: object) -> Ratio:
    [found] = [c for c in cells if c.claim == claim and all(getattr(c, k) == v for k, v in values.items())]
    return found


def test_the_numbers_are_the_papers(cells: list[Ratio]) -> None:
    """arXiv 2501.04266: 1.71, 1.405, 2.398, 0.94. Ours have no paper, but a target."""
    wanted = {c.claim: c.wanted for c in cells}
    assert wanted == {
        "hier3-over-zeropp": 1.71,
        "zeropp-gain-frontier": 1.405,
        "hier3-gain-over-zero3": 2.398,
        "hier3-efficiency": 0.94,
        "frontier-ours-over-zero2": 1,
        "frontier-ours-over-deepspeed": 1,
        "frontier-hier3-over-deepspeed": 1,
    }


def test_one_run_of_a_peer_has_its_stack() -> None:
    one = next(run for run in RUNS if run.engine == "deepspeed")
    assert suite_stacks(CONFIG, [one]) == {"deepspeed": CONFIG.stack_on("deepspeed-zero", "frontier")}


@pytest.mark.parametrize("accumulation", [1, 4, 8])
def test_deepspeeds_ratio_is_that_of_lowband_predict(cells: list[Ratio], accumulation: int) -> None:
    """Its stack has the shares of links that it reached on Frontier."""
    zero3, zeropp = Grid(
        CONFIG, "frontier", ["gpt-20b"], ["zero3", "zeropp"], [384], [1], [accumulation], [2048], ["full"]
    ).records()
    found = cell(cells, "zeropp-gain-frontier", engine="deepspeed", accumulation=accumulation)
    assert found.attained == pytest.approx(zeropp["tflops_per_gpu"] / zero3["tflops_per_gpu"])
    assert (
        found.low
        <= min(found.published, found.attained)
        <= max(found.published, found.attained)
        <= found.high
    )


def test_ours_with_links_as_published_is_that_of_stack_ours(cells: list[Ratio]) -> None:
    zeropp, hier3 = Grid(
        CONFIG, "frontier", ["gpt-20b"], ["zeropp", "hier3"], [384], [1], [4], [2048], ["full"], stack="ours"
    ).records()
    found = cell(cells, "hier3-over-zeropp", over="zeropp", accumulation=4, collectives="hops")
    assert found.published == pytest.approx(hier3["tflops_per_gpu"] / zeropp["tflops_per_gpu"])


def test_one_pass_cannot_decide_and_more_can(cells: list[Ratio]) -> None:
    for found in (c for c in cells if c.claim == "hier3-over-zeropp"):
        assert (found.foreseen == "below") == (found.high < found.wanted * (1 - WITHIN))
        assert (found.foreseen == "") == (found.accumulation > 1)


def test_the_cheapest_cell_is_named_with_its_passes(cells: list[Ratio]) -> None:
    able = next(c for c in cells if not c.foreseen)
    for passes, words in ((1, "1 pass"), (2, "2 passes")):
        last = text([replace(able, accumulation=passes)])[-1]
        assert f"with the fewest node-hours: {words}, ours" in last


def test_what_is_compared(cells: list[Ratio]) -> None:
    """hier3 with our ZeRO++ and, in every condition, with DeepSpeed's; ZeRO++ / ZeRO-3 within an engine."""
    over = [(c.engine, c.over) for c in cells if c.claim == "hier3-over-zeropp"]
    assert {pair: over.count(pair) for pair in over} == {
        ("lowband", "zeropp"): 9, ("lowband", "zeropp of DeepSpeed"): 9,
    }  # fmt: skip
    engines = [c.engine for c in cells if c.claim == "zeropp-gain-frontier"]
    assert (engines.count("lowband"), engines.count("deepspeed")) == (9, 3)
    assert {c.over for c in cells if c.claim == "frontier-hier3-over-deepspeed"} == {"zeropp of DeepSpeed"}
    for claim, over in (("zero2", "zero2"), ("deepspeed", "zeropp of DeepSpeed")):  # depth-first, as they run
        ours = [c for c in cells if c.claim == f"frontier-ours-over-{claim}"]
        assert {(c.scheme, c.order, c.over) for c in ours} == {("planned", "breadth", over)}
        assert {c.accumulation for c in ours} == {1, 4, 8}
    assert {c.over for c in cells if c.claim == "hier3-efficiency"} == {"16 ranks"}


def test_what_is_printed_of_a_hopeless_claim() -> None:
    wanted = Wanted("hopeless", 99.0, Decides(scheme="hier3", ranks=384, over="zeropp"))
    found = ratios(RUNS, [wanted], suite_stacks(CONFIG, RUNS), OWN)
    assert {c.foreseen for c in found} == {"below"}
    assert text(found)[-1] == "no cell can decide hopeless: the outcome of each is foreseen"
    low = ratios(RUNS, [Wanted("low", 0.1, wanted.of)], {}, OWN)  # without a stack the peer is left out
    assert {(c.foreseen, c.over) for c in low} == {("above", "zeropp")}


def test_a_claim_that_is_met_on_one_side_of_a_number_has_no_tolerance(cells: list[Ratio]) -> None:
    of = Decides(scheme="planned", ranks=384, over="zero2", over_engine="lowband")
    low = min(c.low for c in cells if c.claim == "frontier-ours-over-zero2")
    for is_one_sided, foreseen in ((True, {"above"}), (False, {""})):
        wanted = Wanted("frontier-ours-over-zero2", 0.99 * low, of, is_one_sided)
        assert {c.foreseen for c in ratios(RUNS, [wanted], {}, OWN)} == foreseen


def test_a_claim_that_no_runs_are_about_is_refused(tmp_path: Path) -> None:
    wanted = Wanted("lost", 1.0, Decides(scheme="hier3", ranks=96, over="ddp"))
    with pytest.raises(UserError, match="frontier: decides: lost: no two runs give"):
        ratios(RUNS, [wanted], {}, OWN)
    for part in ("config", "slurm", "results"):
        (tmp_path / part).mkdir()
    (tmp_path / "config" / "suites").mkdir()
    for name in ("claims", "experiments"):
        text = (CONFIG.root / "config" / f"{name}.yaml").read_text()
        (tmp_path / "config" / f"{name}.yaml").write_text(text)
    suite = (CONFIG.root / "config/suites/frontier.yaml").read_text()
    (tmp_path / "config/suites/frontier.yaml").write_text(suite.replace("hier3-efficiency:", "hier4:"))
    (tmp_path / "results" / "reported").symlink_to(CONFIG.root / "results" / "reported")
    with pytest.raises(UserError, match="decides: no claim 'hier4' with a number"):
        suite_ratios(Config(tmp_path), "frontier")
