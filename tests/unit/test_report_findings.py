"""What was found: the words of the sentences, checked against the data that their numbers come from."""

import pytest

from lowband.evidence.report.findings import (
    WITHIN,
    findings,
    headline,
    measured_ratios,
    published_ratios,
    read_facts,
)
from lowband.evidence.validation.frontier_maps import frontier_map
from lowband.spec.csv_tables import read_table
from tests.checkout import CONFIG, REFERENCE, ROOT


def test_five_sentences_the_first_of_them_about_the_headline() -> None:
    sentences = findings(ROOT)
    assert len(sentences) == 5
    assert headline(ROOT)["value"] in sentences[0].rest
    assert not any("{" in sentence.rest for sentence in sentences)


def test_the_headline_is_neither_reproduced_nor_refuted() -> None:
    """No run on Frontier, and none at nominal links and one pass where the ratio appears."""
    claims = read_table(REFERENCE / "local" / "tables" / "runs.csv")
    assert set(claims.loc[claims["cluster"] == "frontier", "provenance"]) == {"predicted"}
    facts = read_facts(ROOT)
    assert facts["hier3"] < (1 - WITHIN) * facts["paper_hier3"]
    assert facts["zeropp"] < (1 - WITHIN) * facts["paper_zeropp"]


def test_no_measured_condition_has_all_ratios() -> None:
    measured, published = measured_ratios(ROOT), published_ratios(ROOT)
    close = [(measured[pair] / ratio - 1).abs() <= WITHIN for pair, ratio in published.items()]
    assert len(close) == 3
    assert not (close[0] & close[1] & close[2]).any()
    assert len(measured) == read_facts(ROOT)["conditions"]


def test_the_searched_condition_comes_nearest_to_the_headline_at_nominal_links() -> None:
    passes = measured_ratios(ROOT).query("suite == 'box-accumulation'")["hier3 / zeropp"].droplevel("ranks")
    assert passes.idxmax() == 8
    assert 1 - WITHIN < passes[8] / float(headline(ROOT)["value"]) < 1


def test_predicted_ratios_hold_with_fitted_rates_and_no_overlap_only() -> None:
    holds = frontier_map(CONFIG).groupby(["links_in_node", "overlap"])["holds"].any()
    assert [case for case, does in holds.items() if does] == [("fitted", 0.0)]


def test_which_scheme_when() -> None:
    facts = read_facts(ROOT)
    assert facts["hier3"] == pytest.approx(1, abs=0.05)  # level
    assert facts["hier3_slowest"] < 1
    assert 1 < facts["passes_4"] < facts["passes_8"]


def test_what_holds_without_conditions() -> None:
    folder = REFERENCE / "local" / "tables"
    assert set(read_table(folder / "parity.csv")["distinct_weights"]) == {1}
    for name in ("bytes", "states"):
        assert read_table(folder / f"{name}.csv")["difference_bytes"].max() == 0
    assert read_facts(ROOT)["volume"] == pytest.approx(0.25, abs=0.01)


def test_at_the_attained_rates_no_ratio_is_far_off_and_not_all_are_right() -> None:
    facts = read_facts(ROOT)
    assert facts["attained_ranks"] == 32
    assert WITHIN < facts["attained_off"] / 100 < 3 * WITHIN


def test_the_order_matters_more_than_the_placement() -> None:
    facts = read_facts(ROOT)
    assert facts["order_gain"] > facts["passes_4"]
    assert facts["order_over_hier3"] > 1
