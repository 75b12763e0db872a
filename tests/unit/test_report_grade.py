"""Grading: each verdict, the runs that a claim expects, and where its rows come from."""

import math
import shutil
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from report_runs import smoke_specs, write_failure, write_run

from lowband.errors import UserError
from lowband.evidence.claims.expected import Lack, find_lack
from lowband.evidence.claims.origin import Origin, origin
from lowband.evidence.report.claim_views import write_claims
from lowband.evidence.tables.build import write_table
from lowband.evidence.tables.collect import collect
from lowband.spec.csv_tables import read_table
from lowband.spec.records import Outcome, Status
from tests.checkout import CONFIG, REFERENCE, ROOT
from tests.pairwise import pairwise

BASE: dict[str, Any] = {
    "short": "a claim",
    "sentence": "A claim.",
    "paper_element": "none",
    "kind": "artifact",
    "experiment": "here",
    "ours": {
        "table": "scaling",
        "where": {"scheme": "zero3", "ranks": 8},
        "column": "speedup",
        "aggregate": "max",
    },
    "expects": {},
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
    for name in ("runs", "scaling", "communication"):
        (tmp_path / f"{name}.csv").write_bytes((tables / f"{name}.csv").read_bytes())
    claim = {key: value for key, value in {**BASE, **changes}.items() if value is not None}
    (tmp_path / "claims.yaml").write_text(yaml.safe_dump({"one": claim}))
    (tmp_path / "experiments.yaml").write_text(yaml.safe_dump({"here": EXPERIMENT}))
    write_claims(tmp_path / "claims.yaml", tmp_path, tmp_path, root=ROOT)
    return read_table(tmp_path / "claims.csv").iloc[0]


@pytest.mark.parametrize(
    ("relation", "target", "tolerance", "verdict"),
    [
        (">=", 2, 0, "met"),
        (">=", 3, 0, "not met"),
        (">=", 3, 0.5, "met"),
        (">", 2.5, 0, "not met"),
        ("<=", 2, 0, "not met"),
        ("<=", 2, 0.5, "met"),
        ("<", 2, 0.5, "not met"),
        ("<", 3, 0, "met"),
        ("==", 2.4, 0.2, "met"),
        ("==", 2.4, 0, "not met"),
    ],
)
def test_verdicts(
    tables: Path, tmp_path: Path, relation: str, target: float, tolerance: float, verdict: str
) -> None:
    row = grade(tables, tmp_path, relation=relation, target=target, tolerance=tolerance)
    assert row["verdict"] == verdict
    assert row["ours"] == pytest.approx(2.5)
    assert row["deviation"] == pytest.approx(2.5 - target)
    assert row["tolerance"] == tolerance
    assert row["provenance"] == "measured"
    for view in ("md", "tex", "html"):
        assert verdict in (tmp_path / f"claims.{view}").read_text()


@pytest.mark.parametrize("order", [("smoke", "other"), ("other", "smoke")])
@pytest.mark.parametrize(
    ("relation", "target", "tolerance", "other", "worst"),
    [("==", 2.5, 0.1, 3, 3), ("==", 3, 0.1, 3, 2.5), (">=", 2.5, 0, 2, 2), ("<=", 2.5, 0, 3, 3)],
)
def test_the_worst_experiment_decides(
    tables: Path, tmp_path: Path, relation: str, target: float, tolerance: float, other: float, worst: float,
    order: tuple[str, str],
) -> None:  # fmt: skip
    """Of two suites, of which one meets the target."""
    scaling = read_table(tables / "scaling.csv")
    names = dict(zip(("smoke", "other"), order, strict=True))
    both = [scaling.assign(suite=names["smoke"]), scaling.assign(suite=names["other"], speedup=other)]
    changed = tmp_path / "changed"
    changed.mkdir()
    for name in ("runs", "communication"):
        (changed / f"{name}.csv").write_bytes((tables / f"{name}.csv").read_bytes())
    pd.concat(both).to_csv(changed / "scaling.csv", index=False)
    row = grade(changed, tmp_path, relation=relation, target=target, tolerance=tolerance)
    assert (row["ours"], row["verdict"]) == (pytest.approx(worst), "not met")


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
    assert "no row for scaling.csv" in row["why"]
    assert row["rows"] == 0
    assert pd.isna(row["ours"])


def test_a_cell_without_a_value_is_no_row(tables: Path, tmp_path: Path) -> None:
    """A table may have a row for each run, and a value only for some."""
    changed = tmp_path / "changed"
    shutil.copytree(tables, changed)
    scaling = read_table(tables / "scaling.csv")
    without = scaling.assign(speedup=math.nan)
    for rows, verdict, count in (([scaling, without], "met", 1), ([without], "not run", 0)):
        pd.concat(rows).to_csv(changed / "scaling.csv", index=False)
        row = grade(changed, tmp_path)
        assert (row["verdict"], row["rows"]) == (verdict, count)


def test_measured_rows_do_not_grade_a_predicted_claim(tables: Path, tmp_path: Path) -> None:
    assert grade(tables, tmp_path, evidence="predicted")["verdict"] == "not run"


def test_what_cannot_be_tried_says_why(tables: Path, tmp_path: Path) -> None:
    row = grade(
        tables, tmp_path, ours=None, expects=None, relation=None, target=None, not_run="needs 384 GCDs"
    )
    assert (row["verdict"], row["why"]) == ("not run", "needs 384 GCDs")
    assert pd.isna(row["tolerance"])


def test_rows_of_other_suites_are_not_named(tables: Path, tmp_path: Path) -> None:
    runs, changed = read_table(tables / "runs.csv"), tmp_path / "changed"
    shutil.copytree(tables, changed)
    others = runs.assign(suite="links", run_id=runs["run_id"] + "-links", commit="facade")
    pd.concat([runs, others]).to_csv(changed / "runs.csv", index=False)
    of_smoke = {**BASE["ours"], "where": {**BASE["ours"]["where"], "suite": "smoke"}}
    assert grade(changed, tmp_path, ours=of_smoke)["rows_from"] == "made up, c0ffee"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": None}, "ours, relation and target"),
        ({"expects": None}, "has expects: the runs it needs"),
        ({"expects": {"colour": "red"}}, "no key 'colour'"),
        ({"kind": "relation"}, "names a paper"),
        ({"paper": "2306.10209"}, "names a paper"),
        ({"not_run": "no time"}, "has no ours"),
        ({"not_run": "no time", "ours": None, "expects": None, "relation": None}, "has no ours"),
        ({"colour": "red"}, "unknown key 'colour'"),
        ({"experiment": "there"}, "no experiment 'there'"),
        ({"ours": {**BASE["ours"], "column": "sped"}}, "no column 'sped'"),
        ({"ours": {**BASE["ours"], "where": {"rank": 8}}}, "no column 'rank'"),
        (
            {"ours": {"table": "communication", "column": "closed_form_bytes", "aggregate": "max"}},
            "evidence is measured",
        ),
    ],
)
def test_claims_that_cannot_be_graded_are_refused(
    tables: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        grade(tables, tmp_path, **changes)
    assert not (tmp_path / "claims.csv").exists()


@pytest.mark.parametrize(
    ("reported_as", "printed", "expected"),
    [("printed", ["1.71"], 1.71), ("ratio", ["M", "0.25M"], 0.25), ("gain", ["40.5"], 1.405)],
)
def test_what_a_paper_prints_is_put_into_our_unit(
    tables: Path, tmp_path: Path, reported_as: str, printed: list[str], expected: float
) -> None:
    (tmp_path / "paper.csv").write_text(
        "row,value,unit,source_url,read_as\n" + "".join(f"{i},{v},u,,\n" for i, v in enumerate(printed))
    )
    reported = [{"csv": "paper.csv", "where": {"row": str(i)}} for i in range(len(printed))]
    row = grade(
        tables, tmp_path, kind="relation", paper="2306.10209", reported=reported, reported_as=reported_as
    )
    assert str(row["paper"]) == "2306.10209"
    assert row["reported"] == pytest.approx(expected)
    assert row["printed"] == " -> ".join(printed)
    assert row["printed_unit"] == "u"


def test_a_reported_text_without_a_number_is_refused(tables: Path, tmp_path: Path) -> None:
    (tmp_path / "paper.csv").write_text("row,value,unit,source_url,read_as\n0,about two,u,,\n")
    with pytest.raises(UserError, match="no number in 'about two'"):
        grade(tables, tmp_path, reported=[{"csv": "paper.csv", "where": {"row": "0"}}])


@pytest.mark.parametrize(("where", "says"), [({"unit": "u"}, "2 rows with"), ({"row": "7"}, "0 rows with")])
def test_a_reported_value_is_of_one_row(
    tables: Path, tmp_path: Path, where: dict[str, str], says: str
) -> None:
    (tmp_path / "paper.csv").write_text("row,value,unit,source_url,read_as\n0,1.5,u,,\n1,2.5,u,,\n")
    with pytest.raises(UserError, match=f"paper.csv: {says}.*exactly one"):
        grade(tables, tmp_path, reported=[{"csv": "paper.csv", "where": where}])


def test_our_value_is_put_into_the_claims_unit(tables: Path, tmp_path: Path) -> None:
    row = grade(tables, tmp_path, divided_by=2, target=1.25, relation="==")
    assert (row["ours"], row["verdict"]) == (pytest.approx(1.25), "met")
    assert row["relation"] == "=="


def test_a_fit_is_never_a_pass(tables: Path, tmp_path: Path) -> None:
    row = grade(tables, tmp_path, is_fit=True)
    assert row["verdict"] == "fit"
    assert "constants" in row["why"]


def test_a_few_values_are_given_one_by_one(tables: Path, tmp_path: Path) -> None:
    ours = {"table": "scaling", "where": {"scheme": "zero3", "ranks": [4, 8]}, "column": "speedup"}
    row = grade(tables, tmp_path, ours={**ours, "aggregate": "min"})
    assert row["ours"] == pytest.approx(2)
    assert row["values"] == "2, 2.5"
    halves = grade(tables, tmp_path, ours={**ours, "aggregate": "min"}, divided_by=2)
    assert halves["values"] == "1, 1.25"


def test_a_value_that_no_row_has_is_partial(tables: Path, tmp_path: Path) -> None:
    """One of the points that a claim names fell out of the table, and the others would pass."""
    ours = {**BASE["ours"], "where": {"scheme": "zero3", "ranks": [8, 32]}}
    row = grade(tables, tmp_path, ours=ours)
    assert (row["verdict"], row["why"]) == ("partial", "no row with ranks 32; on the others: met")


SELF_CHECKS = ("losses-agree", "weights-bit-equal", "bytes-closed-form", "memory-closed-form")
TABLES_OF_SELF_CHECKS = ("loss", "parity", "communication", "memory")


def grade_self_checks(folder: Path, specs: list[Any], failures: int, outcome: Outcome | None) -> pd.DataFrame:
    """The self-checks, after the last `failures` of the runs ended with this outcome."""
    ok = specs[: len(specs) - failures]
    runs = [write_run(folder / "runs", spec, 1, loss=5) for spec in ok]
    runs += [write_failure(folder / "runs", spec, outcome) for spec in specs[len(ok) :]]
    collect(runs, folder)
    for name in TABLES_OF_SELF_CHECKS:
        write_table(name, folder)
    claims = yaml.safe_load((ROOT / "config" / "claims.yaml").read_text())
    chosen = {name: {**claims[name], "experiment": "here"} for name in SELF_CHECKS}
    (folder / "claims.yaml").write_text(yaml.safe_dump(chosen))
    (folder / "experiments.yaml").write_text(yaml.safe_dump({"here": EXPERIMENT}))
    write_claims(folder / "claims.yaml", folder, folder, root=ROOT)
    return read_table(folder / "claims.csv").set_index("id")


def test_self_checks_pass_when_every_run_is_ok(tmp_path: Path) -> None:
    graded = grade_self_checks(tmp_path, CONFIG.runs(["default"]), 0, None)
    assert set(graded["verdict"]) == {"met"}
    assert set(graded["origin"]) == {"this run"}


@pytest.mark.parametrize(
    ("failures", "status"), pairwise(product([1, 5, 32], ["error", "oom", "timeout", "overloaded"]), size=1)
)
def test_no_self_check_passes_when_runs_are_not_ok(tmp_path: Path, failures: int, status: Status) -> None:
    specs = CONFIG.runs(["default"])
    assert len(specs) == 36
    graded = grade_self_checks(tmp_path, specs, failures, Outcome(status=status, cause="by fiat", steps=0))
    assert list(graded["verdict"]) == ["partial"] * len(SELF_CHECKS)
    for _, row in graded.iterrows():
        assert f"of 36 runs: {failures} {status}, by fiat" in row["why"]
        assert row["lacking"].count(f"{status}, by fiat") == failures
        assert specs[-1].run_id in row["lacking"]


def test_a_run_that_left_no_row_is_missing(tmp_path: Path) -> None:
    """Half of a suite's repeats, say, were never run or not shipped."""
    specs = smoke_specs()
    graded = grade_self_checks(tmp_path, specs[:-1], 0, None)
    assert set(graded["verdict"]) == {"partial"}
    assert set(graded["lacking"]) == {f"{specs[-1].run_id}: missing"}


def test_nothing_ok_is_partial_without_a_value(tmp_path: Path) -> None:
    graded = grade_self_checks(tmp_path, smoke_specs(), 9, None)
    assert set(graded["verdict"]) == {"partial"}
    assert graded["ours"].isna().all()


def test_only_the_expected_runs_count(tables: Path, tmp_path: Path) -> None:
    runs = read_table(tables / "runs.csv")
    runs.loc[runs["scheme"] == "hsdp", ["status", "cause"]] = ["oom", "by fiat"]
    changed = tmp_path / "changed"
    changed.mkdir()
    for name in ("scaling", "communication"):
        (changed / f"{name}.csv").write_bytes((tables / f"{name}.csv").read_bytes())
    runs.to_csv(changed / "runs.csv", index=False)
    assert grade(changed, tmp_path, expects={"scheme": "zero3"})["verdict"] == "met"
    assert grade(changed, tmp_path, expects={"scheme": ["zero3", "hsdp"], "ranks": 8})["verdict"] == "partial"
    assert grade(changed, tmp_path, expects={})["verdict"] == "partial"


def test_runs_of_the_other_kind_of_evidence_are_not_expected(tables: Path) -> None:
    """A folder may hold both: runs on ranks, and runs on fake tensors of a suite that was cut short."""
    runs = read_table(tables / "runs.csv")
    both = pd.concat([runs, runs.iloc[:1].assign(suite="volume", run_id="one")])
    predicted = {spec.run_id for spec in CONFIG.runs(["volume"])}
    assert find_lack({}, "measured", both, ROOT, "") == Lack(len(runs), {})
    found = find_lack({}, "predicted", both, ROOT, "")
    assert (found.expected, set(found.runs)) == (len(predicted), predicted)


def test_a_point_without_counterpart_is_not_expected(tmp_path: Path) -> None:
    """DDP shards nothing, FSDP2 has no hier3-exact: rows `not run`, by design."""
    runs = read_table(REFERENCE / "peers" / "runs.csv")
    not_run = set(runs.loc[runs["status"] == "not run", "run_id"])
    graded = read_graded_peers(tmp_path)
    assert not_run
    lacking = str(graded.loc["peers-agree", "lacking"])  # "nan" where no run lacks
    assert not any(run_id in lacking for run_id in not_run)


def read_graded_peers(out: Path) -> pd.DataFrame:
    reference = REFERENCE / "peers"
    (out / "runs.csv").write_bytes((reference / "runs.csv").read_bytes())
    write_table("peers", reference, out)
    write_claims(ROOT / "config" / "claims.yaml", out, out, ["peers-agree"], root=ROOT)
    return read_table(out / "claims.csv").set_index("id")


@pytest.mark.parametrize(
    ("table", "expected"),
    [("scaling", "this run"), ("box", "shipped"), ("softmax", "shipped"), ("accuracy", "computed")],
)
def test_rows_come_from_this_run_or_are_shipped(tables: Path, table: str, expected: str) -> None:
    assert origin(table, tables, ROOT).name == expected


def test_machine_and_commits_of_the_rows_asked_for(tmp_path: Path) -> None:
    """Of one kind of evidence and one suite, each named once; a commit by its first seven digits."""
    rows = [
        ("measured", "a", "one", "0123456789"), ("measured", "a", "two", "abcdef0123"),
        ("measured", "b", "three", "1111111111"), ("measured", "a", "one", "0123456789"),
        ("predicted", "a", "four", "2222222222"), ("measured", "a", None, None),
    ]  # fmt: skip
    columns = ["provenance", "suite", "device", "commit"]
    pd.DataFrame(rows, columns=columns).to_csv(tmp_path / "runs.csv", index=False)
    assert Origin("shipped", tmp_path).machine("measured", "a") == ("one and two", "0123456 abcdef0")
    assert Origin("this run", tmp_path).machine("measured", None)[0] == "one and two and three"
    assert Origin("this run", tmp_path).machine("predicted", None) == ("four", "2222222")
    assert Origin("computed", tmp_path).machine("measured", None) == ("", "")


def test_a_shipped_reproduction_measured_nothing_here(tmp_path: Path) -> None:
    shipped = REFERENCE / "local" / "tables" / "runs.csv"
    (tmp_path / "runs.csv").write_bytes(shipped.read_bytes())
    assert {origin(table, tmp_path, ROOT).name for table in ("scaling", "box", "softmax")} == {"shipped"}


def test_own_measurements_of_a_shipped_suite_are_this_run(tables: Path, tmp_path: Path) -> None:
    runs = read_table(tables / "runs.csv").assign(suite="box-sweep")
    runs.to_csv(tmp_path / "runs.csv", index=False)
    assert origin("box", tmp_path, ROOT).name == "this run"
    assert origin("convergence", tmp_path, ROOT).name == "shipped"
