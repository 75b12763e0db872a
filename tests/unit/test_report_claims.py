"""Claims: each verdict, and what is refused."""

import html
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from report_runs import ROOT

from lowband.errors import UserError
from lowband.report.claim_views import latex_text, read_graded
from lowband.report.claims import read_claims, write_claims
from lowband.report.experiments import read_experiments
from lowband.report.files import read_table
from lowband.report.summary import summary

BASE: dict[str, Any] = {
    "short": "a claim",
    "sentence": "A claim.",
    "paper_element": "none",
    "kind": "relation",
    "experiment": "here",
    "ours": {
        "table": "scaling",
        "where": {"scheme": "zero3", "ranks": 8},
        "column": "speedup",
        "aggregate": "max",
    },
    "relation": ">=",
    "target": 2,
}


EXPERIMENT: dict[str, Any] = {
    "title": "made up",
    "hardware": "any",
    "human_minutes": 1,
    "machine_minutes": 2,
}


def grade(tables: Path, tmp_path: Path, **changes: object) -> "pd.Series[Any]":
    """The row of one claim against the made-up tables, in which zero3's speed-up on 8 ranks is 2.5."""
    for name in ("scaling", "communication"):
        (tmp_path / f"{name}.csv").write_bytes((tables / f"{name}.csv").read_bytes())
    claim = {key: value for key, value in {**BASE, **changes}.items() if value is not None}
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump({"one": claim}))
    (tmp_path / "experiments.yaml").write_text(yaml.safe_dump({"here": EXPERIMENT}))
    write_claims(tmp_path / "claims.yaml", tmp_path, tmp_path)
    return read_table(tmp_path / "claims.csv").iloc[0]


@pytest.mark.parametrize(
    ("relation", "target", "tolerance", "verdict"),
    [
        (">=", 2, 0, "pass"),
        (">=", 3, 0, "short"),
        (">=", 3, 0.5, "pass"),
        (">", 2.5, 0, "short"),
        ("<=", 2, 0, "short"),
        ("<", 3, 0, "pass"),
        ("==", 2.4, 0.2, "pass"),
        ("==", 2.4, 0, "short"),
    ],
)
def test_verdicts(
    tables: Path, tmp_path: Path, relation: str, target: float, tolerance: float, verdict: str
) -> None:
    row = grade(tables, tmp_path, relation=relation, target=target, tolerance=tolerance)
    assert row["verdict"] == verdict
    assert row["ours"] == pytest.approx(2.5)
    assert row["deviation"] == pytest.approx(2.5 - target)
    assert row["provenance"] == "measured"


def test_a_ratio_of_two_queries(tables: Path, tmp_path: Path) -> None:
    per = {
        "table": "scaling",
        "where": {"scheme": "hpz", "ranks": 8},
        "column": "speedup",
        "aggregate": "max",
    }
    assert grade(tables, tmp_path, per=per)["ours"] == pytest.approx(2.5 / 1.25)


def test_no_matching_row_is_not_run(tables: Path, tmp_path: Path) -> None:
    ours = {**BASE["ours"], "where": {"scheme": "zero3", "ranks": 384}}
    row = grade(tables, tmp_path, ours=ours)
    assert row["verdict"] == "not run"
    assert "no row of scaling.csv" in row["why"]
    assert pd.isna(row["ours"])


def test_measured_rows_do_not_grade_a_predicted_claim(tables: Path, tmp_path: Path) -> None:
    assert grade(tables, tmp_path, evidence="predicted")["verdict"] == "not run"


def test_what_cannot_be_tried_says_why(tables: Path, tmp_path: Path) -> None:
    row = grade(tables, tmp_path, ours=None, relation=None, target=None, not_run="needs 384 GCDs")
    assert (row["verdict"], row["why"]) == ("not run", "needs 384 GCDs")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": None}, "ours, relation and target"),
        ({"not_run": "no time"}, "has no ours"),
        ({"colour": "red"}, "unknown key 'colour'"),
        ({"experiment": "there"}, "no experiment 'there'"),
        ({"ours": {**BASE["ours"], "column": "sped"}}, "no column 'sped'"),
        ({"ours": {**BASE["ours"], "where": {"rank": 8}}}, "no column 'rank'"),
        (
            {"ours": {"table": "communication", "column": "closed_form_bytes", "aggregate": "max"}},
            "says measured",
        ),
    ],
)
def test_claims_that_cannot_be_graded_are_refused(
    tables: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        grade(tables, tmp_path, **changes)
    assert not (tmp_path / "claims.csv").exists()


def test_the_shipped_claims(tables: Path, tmp_path: Path) -> None:
    """Made-up losses differ by more than the bound; everything else that the smoke suite tries holds."""
    claims = ROOT / "config" / "claims.yaml"
    for table in tables.glob("*.csv"):
        (tmp_path / table.name).write_bytes(table.read_bytes())
    write_claims(claims, tmp_path, tmp_path)
    df = read_table(tmp_path / "claims.csv").set_index("id")
    assert len(df) == len(read_claims(claims))
    assert list(df["kind"]) == sorted(df["kind"], reverse=True)  # relations first
    assert df.loc["losses-agree", "verdict"] == "short"
    for name in ("weights-bit-equal", "bytes-closed-form", "memory-closed-form", "hpz-backward-in-node"):
        assert df.loc[name, "verdict"] == "pass", name
    assert df.loc["hier3-over-zeropp", "verdict"] == "not run"
    assert df.loc["hier3-over-zeropp", "reported"] == "1.71"
    assert (df["why"].notna() == (df["verdict"] == "not run")).all()

    screen = summary(tmp_path / "claims.csv", tmp_path, tmp_path / "figures").splitlines()
    assert len(screen) <= 60
    assert screen[0] == "9 runs: 9 ok"


def test_one_claim_alone(tmp_path: Path, tables: Path) -> None:
    claims = ROOT / "config" / "claims.yaml"
    write_claims(claims, tables, tmp_path, "bytes-closed-form")
    assert list(read_table(tmp_path / "claims.csv")["id"]) == ["bytes-closed-form"]
    with pytest.raises(UserError, match="no claim 'nope'"):
        write_claims(claims, tables, tmp_path, "nope")


def test_minutes_are_of_shipped_runs() -> None:
    experiments = read_experiments(ROOT / "config")
    runs = read_table(ROOT / "results" / "reference" / "box" / "runs.csv")
    took = runs.loc[runs["suite"] == "box", "wall_s"].sum() / 60
    assert experiments["box"].minutes(ROOT / "config") == pytest.approx(took)
    for experiment in experiments.values():
        is_tried = bool(experiment.command)
        assert is_tried == (experiment.minutes(ROOT / "config") is not None), experiment.id


def test_every_view_has_every_claim(tables: Path, tmp_path: Path) -> None:
    claims = ROOT / "config" / "claims.yaml"
    write_claims(claims, tables, tmp_path)
    views = {suffix: (tmp_path / f"claims.{suffix}").read_text() for suffix in ("md", "tex", "html")}
    for claim in read_claims(claims):
        assert claim.short in views["md"]
        assert latex_text(claim.short) in views["tex"]
        assert html.escape(claim.short) in views["html"]
    assert views["tex"].count(r"\begin{longtable}") == views["tex"].count(r"\end{longtable}") == 2


def test_latex_text_is_taken_literally() -> None:
    assert latex_text("a_b & 50 % <= {x} +- 1") == (r"a\_b \& 50 \% $\leq$ \{x\} $\pm$ 1")


def test_another_table_is_no_graded_claims(tmp_path: Path) -> None:
    (tmp_path / "claims.csv").write_text("id,verdict\na,pass\n")
    with pytest.raises(UserError, match="no graded claims"):
        read_graded(tmp_path / "claims.csv")
    (tmp_path / "claims.csv").write_text("# words\n\na,b\n1,2,3\n")
    with pytest.raises(UserError, match="no such table"):
        read_graded(tmp_path / "claims.csv")
