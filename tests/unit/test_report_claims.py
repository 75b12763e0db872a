"""config/claims.yaml and its experiments, and graded claims for a reader."""

import re
import shutil
from pathlib import Path

import pandas as pd
import pytest
from markupsafe import escape
from report_runs import write_run

from lowband.errors import UserError
from lowband.evidence.claims.claim import KINDS, PAPERS, read_claims
from lowband.evidence.claims.expected import one_of
from lowband.evidence.claims.experiments import Experiment, read_experiments
from lowband.evidence.claims.grade import grade_claims
from lowband.evidence.report.claim_views import by_kind, by_paper, read_graded, write_claims
from lowband.evidence.report.needs import disk
from lowband.evidence.report.summary import summary
from lowband.evidence.report.writers import latex_text
from lowband.evidence.tables.build import write_table
from lowband.evidence.tables.collect import collect
from lowband.evidence.validation import SOURCES
from lowband.run import doctor
from lowband.spec.csv_tables import read_table
from lowband.spec.files import write_whole
from lowband.spec.plain_data import read_yaml
from tests.checkout import CONFIG, REFERENCE, ROOT

CLAIMS = ROOT / "config" / "claims.yaml"


@pytest.fixture(scope="module")
def graded(all_tables: Path) -> Path:
    """A folder with the claims as `make smoke` would grade them."""
    return all_tables


def test_the_shipped_claims(graded: Path) -> None:
    """Made-up losses differ by more than the bound; everything else that the smoke suite tries holds."""
    df = read_graded(graded / "claims.csv").set_index("id")
    assert len(df) == len(read_claims(CLAIMS))
    assert list(df["kind"]) == sorted(df["kind"], key=list(KINDS).index)
    assert df.loc["losses-agree", "verdict"] == "not met"
    for name in ("weights-bit-equal", "bytes-closed-form", "memory-closed-form", "hpz-backward-in-node"):
        assert df.loc[name, "verdict"] == "met", name
        assert df.loc[name, "origin"] == "this run", name
    assert df.loc["hier3-over-zeropp", "verdict"] == "not run"
    assert df.loc["hier3-over-zeropp", "printed"] == "1.71"
    assert (df["why"].notna() == df["verdict"].isin(["not run", "partial", "fit"])).all()
    assert (df["origin"].isna() == (df["verdict"] == "not run")).all()


def test_shipped_rows_have_machine_date_and_commit(graded: Path) -> None:
    df = read_graded(graded / "claims.csv")
    shipped = df[df["origin"] == "shipped"]
    assert len(shipped)
    for text in shipped["rows_from"]:
        assert pd.Series([text]).str.fullmatch(r".+, \d{4}-\d\d-\d\d, [0-9a-f]{7}( [0-9a-f]{7})*").all(), text
    assert set(df.loc[df["origin"] == "this run", "rows_from"]) == {"made up, c0ffee"}


def test_reported_ours_and_target_are_in_one_unit(graded: Path) -> None:
    df = read_graded(graded / "claims.csv")
    printed = df[df["printed"].notna() & df["target"].notna()]
    assert len(printed) > 5
    assert printed["reported"].notna().all()
    exact = printed[printed["paper"].notna() & ~printed["id"].isin(["hpz-backward-in-node"])]
    assert list(exact["reported"]) == pytest.approx(list(exact["target"]))


def test_a_fit_is_what_is_graded_on_rows_of_a_fit() -> None:
    """Of calibration rows; and a ratio of the paper, on the box whose rates were fitted to both of them."""
    for claim in read_claims(CLAIMS):
        wanted = [query.where for query in claim.queries]
        is_calibration = any(where.get("use") == "calibration" for where in wanted)
        on_fitted_links = any(where.get("suite") == "box-attained" for where in wanted) and bool(
            claim.reported
        )
        is_ratio = any(query.column.startswith("over_") for query in claim.queries)
        assert claim.is_fit == (is_calibration or (on_fitted_links and is_ratio)), claim.id


def test_no_efficiency_is_graded_that_the_host_limits() -> None:
    """Against a paper's number only where real work took less than a tenth of the paced time."""
    runs = read_table(REFERENCE / "box" / "runs.csv")
    checked = 0
    for claim in read_claims(CLAIMS):
        for query in claim.queries:
            is_of_a_site = query.where.get("suite") == "frontier"  # where each rank has a device of its own
            if query.column == "efficiency" and claim.reported and not is_of_a_site:
                used = runs
                for column in ("suite", "scheme", "ranks"):
                    used = used[used[column].isin(one_of(query.where[column]))]
                assert len(used) == 3 and (used["real_share"] < 0.1).all(), claim.id
                checked += 1
    assert checked == 2


def test_another_processor_is_told(all_tables: Path, graded: Path, tmp_path: Path) -> None:
    shipped = REFERENCE / "softmax" / "intel-xeon" / "softmax_setup.csv"
    shutil.copytree(all_tables, tmp_path / "tables")
    for text, is_other in (
        (shipped.read_text(), False),
        (shipped.read_text().replace("Intel", "Zilog"), True),
    ):
        (tmp_path / "tables" / "softmax_setup.csv").write_text(text)
        shown = summary(graded / "claims.csv", tmp_path / "tables", None, ROOT)
        assert ("softmax was measured on Zilog(R) Xeon(R) Processor, 2 cores; shipped" in shown) == is_other
    assert "Zilog" not in summary(graded / "claims.csv", all_tables, None, ROOT)


def test_every_source_of_the_predictor_is_graded() -> None:
    graded = {query.where.get("source") for claim in read_claims(CLAIMS) for query in claim.queries}
    assert set(SOURCES) <= graded


def test_expected_runs_include_those_that_are_asked_for() -> None:
    """A scheme, rank count or suite in a claim's query is among the runs that it expects."""
    for claim in read_claims(CLAIMS):
        for query in claim.queries:
            for key in {"suite", "scheme", "ranks", "accumulation"} & set(query.where):
                if claim.expects is not None and key in claim.expects:
                    asked, expected = query.where[key], claim.expects[key]
                    asked = asked if isinstance(asked, tuple) else (asked,)
                    assert set(asked) <= set(expected if isinstance(expected, tuple) else (expected,)), (
                        claim.id
                    )


def test_the_screen_leads_with_what_this_run_showed(all_tables: Path, graded: Path) -> None:
    lines = summary(graded / "claims.csv", all_tables, all_tables / "figures").splitlines()
    assert len(lines) <= 60
    assert lines[0] == "9 runs: 9 ok"
    [own] = [line for line in lines if line.startswith("This run: ")]
    df = read_graded(graded / "claims.csv")
    assert own == f"This run: {(df['origin'] == 'this run').sum() - 1} met, 1 not met"
    [shipped] = [line for line in lines if line.startswith("Shipped results")]
    assert lines.index(own) < lines.index(shipped)
    listed = [line for line in lines if re.match(r"  (met|not met|partial|fit) ", line)]
    assert len(listed) == (df["origin"] == "this run").sum()
    assert lines[-1].endswith(str(all_tables.parent / "page.html"))
    assert not any(
        "page.html" in line for line in summary(graded / "claims.csv", all_tables, None).splitlines()
    )


def test_a_site_grades_the_claims_of_the_suite_frontier(tmp_path: Path) -> None:
    """Made-up times on 384 GCDs, each scheme its own: every claim has its ratio."""
    ids = {"hier3-over-zeropp": 1.71, "zeropp-gain-frontier": 1.405, "hier3-gain-over-zero3": 1.405 * 1.71}
    ids |= {"frontier-ours-over-deepspeed": 2.5, "frontier-hier3-over-deepspeed": 1.9}
    of_flat = {"zero3": 1.0, "zeropp": 1 / 1.405, "hier3": 1 / 1.405 / 1.71}
    of_hops = {
        ("zeropp", "deepspeed"): 1.0,
        ("zeropp", "lowband"): 0.9,
        ("planned", "lowband"): 0.4,
        ("hier3", "lowband"): 1 / 1.9,
    }
    runs = []
    for spec in CONFIG.runs(["frontier"]):
        scheme, of = spec.scheme.name, (spec.scheme.name, spec.engine)
        if (spec.ranks, spec.accumulation) != (384, 4):
            continue
        if spec.collectives == "flat" and not spec.overlap and scheme in of_flat:
            runs.append(write_run(tmp_path / "runs", spec, of_flat[scheme], 3.0))
        if spec.collectives == "hops" and of in of_hops:
            runs.append(write_run(tmp_path / "runs", spec, of_hops[of], 3.0))
    collect(runs, tmp_path)
    write_table("scaling", tmp_path)
    graded = grade_claims(CLAIMS, tmp_path, list(ids), ROOT).set_index("id")
    assert set(graded["verdict"]) == {"met"}, graded["why"]
    assert dict(graded["ours"]) == pytest.approx(ids)


def test_claims_are_counted_by_paper_and_by_kind_apart(graded: Path) -> None:
    df = read_graded(graded / "claims.csv")
    for table in (by_paper(df), by_kind(df)):
        assert list(table.columns[3:-1]) == ["this run", "shipped", "computed"]
        assert table["claims"].astype(int).sum() == len(df)
        assert table[["graded", "not possible here"]].astype(int).sum().sum() == len(df)
        numbers = re.findall(r"\d+", " ".join(table.iloc[:, 3:-1].to_numpy().ravel()))
        assert sum(map(int, numbers)) == (df["verdict"] != "not run").sum()
    assert list(by_paper(df)["paper"])[:-1] == list(PAPERS.values())


def test_one_claim_alone(tmp_path: Path, all_tables: Path) -> None:
    write_claims(CLAIMS, all_tables, tmp_path, ["bytes-closed-form"], ROOT)
    assert list(read_table(tmp_path / "claims.csv")["id"]) == ["bytes-closed-form"]
    with pytest.raises(UserError, match="no claim 'nope'"):
        write_claims(CLAIMS, all_tables, tmp_path, ["nope"], ROOT)


def test_minutes_are_of_shipped_runs() -> None:
    for experiment in read_experiments(ROOT / "config").values():
        minutes = experiment.minutes(ROOT / "config")
        assert bool(experiment.command) == (minutes is not None), experiment.id
        if experiment.measured is not None:
            runs = pd.read_csv(ROOT / "config" / experiment.measured.runs)
            took = runs.loc[runs["suite"].isin(suites_of(experiment.command)), "wall_s"].sum() / 60
            assert minutes == pytest.approx(took), experiment.id


def test_minutes_of_what_nobody_ran_are_its_time_limits(tmp_path: Path) -> None:
    """3 repeats of 2 schemes on 2 numbers of ranks, 90 s each."""
    suite = (
        "purpose: x\ncluster: local\nrepeats: 3\naxes: {scheme: [ddp, zero3], ranks: [1, 2]}\n"
        "fixed: {model: gpt-200k, micro_batch: 1, seq_len: 64, steps: 6, time_limit_s: 90}\n"
    )
    write_whole(tmp_path / "config" / "suites" / "mine.yaml", suite)
    one = {"id": "x", "title": "x", "hardware": "x", "human_minutes": 1, "time_limits": ["mine"]}
    assert Experiment.parse(one, "file").minutes(tmp_path / "config") == 3 * 2 * 2 * 90 / 60
    with pytest.raises(UserError, match="no suite 'mine'"):
        Experiment.parse(one, "file").minutes(ROOT / "config")
    with pytest.raises(UserError, match="one of measured, machine_minutes and time_limits"):
        Experiment.parse({**one, "machine_minutes": 1}, "file")


def test_memory_and_disk_are_of_shipped_runs() -> None:
    """By hand for `make reproduce`, whose largest run has 16 ranks; `lowband doctor` asks for no less."""
    experiments = read_experiments(ROOT / "config")
    runs = pd.read_csv(REFERENCE / "local" / "tables" / "runs.csv")
    measured = runs[runs["provenance"] == "measured"]
    largest = max(row.ranks * row.peak_memory_bytes_max for row in measured.itertuples()) / 2**30
    assert experiments["reproduce"].memory_gib(ROOT / "config") == pytest.approx(largest)
    assert doctor.NEEDED_MEMORY_GIB - 1 < largest <= doctor.NEEDED_MEMORY_GIB
    assert experiments["frontier"].memory_gib(ROOT / "config") is None
    lines = (REFERENCE / "local" / "disk.csv").read_text().splitlines()[1:]
    kib = {path: int(size) for size, path in (line.split(",") for line in lines)}
    assert f"{kib['.venv'] / 2**20:.1f} GiB for the set-up" in disk(ROOT)
    assert sum(kib.values()) / 2**20 < doctor.NEEDED_DISK_GIB


def suites_of(command: str) -> list[str]:
    """The suites that a command runs, by the command and the configuration that it reads."""
    if command == "make reproduce":
        return CONFIG.default_suites
    if found := re.search(r"suites=\[([\w,-]+)\]", command):
        return found[1].split(",")
    assert command.endswith("--profile slurm")
    profile = read_yaml(ROOT / "slurm" / "config.yaml")
    return re.findall(r"suites=\['([\w-]+)'\]", " ".join(profile["config"]))


def test_minutes_of_a_suite_without_runs_are_refused(tmp_path: Path) -> None:
    [box] = [e for e in read_experiments(ROOT / "config").values() if e.id == "box"]
    measured = box.measured.model_copy(update={"runs": str(tmp_path / "runs.csv")})
    (tmp_path / "runs.csv").write_text("suite,wall_s\nanother,1\n")
    with pytest.raises(UserError, match="no run of suite 'box'"):
        box.model_copy(update={"measured": measured}).minutes(ROOT / "config")


def test_every_view_has_every_claim(graded: Path) -> None:
    views = {suffix: (graded / f"claims.{suffix}").read_text() for suffix in ("md", "tex", "html")}
    for claim in read_claims(CLAIMS):
        assert claim.short in views["md"]
        assert latex_text(claim.short) in views["tex"]
        assert escape(claim.short) in views["html"]
    assert views["tex"].count(r"\begin{longtable}") == views["tex"].count(r"\end{longtable}") == 2


def test_latex_text_is_taken_literally() -> None:
    assert latex_text("a_b & 50 % <= {x} +- 1") == (r"a\_b \& 50 \% $\leq$ \{x\} $\pm$ 1")
    assert latex_text("run `x --a 'b'` now") == (
        r"run \texttt{x -{}-{}a \textquotesingle{}b\textquotesingle{}} now"
    )


def test_another_table_is_no_graded_claims(tmp_path: Path) -> None:
    (tmp_path / "claims.csv").write_text("id,verdict\na,met\n")
    with pytest.raises(UserError, match="no graded claims"):
        read_graded(tmp_path / "claims.csv")
    (tmp_path / "claims.csv").write_text("# words\n\na,b\n1,2,3\n")
    with pytest.raises(UserError, match="no such table"):
        read_graded(tmp_path / "claims.csv")
