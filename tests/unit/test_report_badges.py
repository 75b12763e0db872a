"""What a reviewer reads first: the badges, in words that follow the verdicts, and the contributions."""

from pathlib import Path

import pandas as pd
import pytest

from lowband.errors import UserError
from lowband.evidence.claims.claim import read_claims
from lowband.evidence.report.badges import badges, contributions, one_line
from lowband.spec.files import write_whole
from tests.checkout import ROOT

CFF = "cff-version: 1.2.0\ntitle: x\n"


def graded(*rows: tuple[str, str, str | None, float | None, str]) -> pd.DataFrame:
    frame = pd.DataFrame(rows, columns=["id", "verdict", "badge", "ours", "kind"])
    return frame.assign(experiment="somewhere")


CLAIMS = graded(
    ("a", "met", "bytes are a quarter", 0.25, "relation"),
    ("b", "not met", "its 1.71", 0.99312, "absolute"),
    ("c", "fit", "its 1.4", 1.4, "absolute"),
    ("d", "met", None, 1.0, "artifact"),
    ("e", "not run", None, None, "relation"),
    ("f", "not met", "it scales", 2.0, "relation"),
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_whole(tmp_path / "CITATION.cff", CFF)
    return tmp_path


def test_a_sentence_for_each_badge(root: Path) -> None:
    available, functional, reproduced = badges(CLAIMS, root)
    assert (available.state, functional.state, reproduced.state) == ("not yet", "yes", "in part")
    assert "about the artifact itself: 1 met" in functional.reason
    missed = "its 1.71 (here 0.9931), it scales (here 2)"
    by_verdict = f"met: bytes are a quarter; not met: {missed}; fits: its 1.4"
    assert reproduced.sentence.startswith(f"Reproduced: in part; {by_verdict}; because ")
    line = one_line(CLAIMS, root)
    assert "\n" not in line
    assert (
        "in part: 1 of 2 relations tried are met; relations not met: it scales; numbers not met: its 1.71 ("
        in line
    )
    assert "relations tried are met ([why]" in one_line(CLAIMS.assign(verdict="met"), root)


@pytest.mark.parametrize(("verdict", "state"), [("met", "yes"), ("not met", "no"), ("fit", "no")])
def test_how_far_it_is_reproduced_follows_the_verdicts(verdict: str, state: str, root: Path) -> None:
    assert badges(CLAIMS.assign(verdict=verdict), root)[2].state == state


def test_a_doi_makes_it_available(root: Path) -> None:
    write_whole(root / "CITATION.cff", CFF + "doi: 10.1/2\n")
    assert badges(CLAIMS, root)[0].sentence == "Available: yes; archived as doi:10.1/2."
    assert "available: yes;" in one_line(CLAIMS, root)


def test_a_contribution_has_its_claims_verdicts(root: Path) -> None:
    write_whole(root / "contributions.yaml", "one:\n  sentence: It works.\n  claims: [a, b, d]\n")
    [found] = contributions(CLAIMS, root)
    assert (found["number"], found["sentence"], found["verdicts"]) == (1, "It works.", "2 met, 1 not met")
    write_whole(root / "contributions.yaml", "one:\n  sentence: It works.\n  claims: [a, z]\n")
    with pytest.raises(UserError, match="no claim 'z'"):
        contributions(CLAIMS, root)


def test_five_contributions_and_the_claims_that_a_reviewer_asks_about() -> None:
    claims = read_claims(ROOT / "config" / "claims.yaml")
    rows = pd.DataFrame(
        {"id": claim.id, "verdict": "met", "experiment": claim.experiment} for claim in claims
    )
    assert len(contributions(rows, ROOT / "config")) == 5
    counted = {claim.id for claim in claims if claim.badge}
    assert {"box-hier3-over-zeropp", "box-order", "zeropp-volume", "zeropp-converges"} <= counted
    of_the_paper = {c.id for c in claims if c.kind == "relation" and c.paper == "2501.04266"}
    assert {"box-accumulation-4", "box-hier3-scales-best"} <= of_the_paper & counted
    assert not any(claim.kind == "artifact" or claim.is_fit for claim in claims if claim.id in counted)
