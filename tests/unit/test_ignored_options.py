"""What the command line would ignore, or write elsewhere, is refused in one line, and nothing is written."""

import json
import sys
from pathlib import Path

import pytest

from lowband.__main__ import main
from tests.checkout import ROOT
from tests.printed import printed_by

PREDICT = ["predict", "--cluster", "frontier", "--model", "gpt-20b", "--scheme", "zero3", "--gpus", "8"]
PLAN = ["plan", "--cluster", "frontier", "--model", "gpt-1m", "--gpus", "8"]


@pytest.mark.parametrize("name", ["", "../mine", "a/b", ".", "a b"])
@pytest.mark.parametrize(
    "arguments",
    [
        ["status"], ["watch"], ["provenance", "--out", "x.zip"],
        [*PLAN, "--tp", "1", "--pp", "1", "--micro-batch", "1", "--recompute", "full"],
    ],
    ids=["status", "watch", "provenance", "plan"],
)  # fmt: skip
def test_a_name_that_leads_elsewhere_is_refused(
    arguments: list[str],
    name: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    option = "--write" if arguments[0] == "plan" else "--results"
    given = [option, name, *(["--", sys.executable, "-c", ""] if arguments[0] == "watch" else [])]
    assert f"'{name}' (allowed: a name of letters" in printed_by(capsys, *arguments, *given, code=2)
    assert [*tmp_path.rglob("*")] == [tmp_path / "here"]


@pytest.mark.parametrize("arguments", [PREDICT, PLAN, ["doctor"], ["verify"]])
def test_a_root_that_is_not_there_is_refused(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Built-in names would be taken in place of those of a folder with a typing error."""
    root = str(tmp_path / "none")
    refused = printed_by(capsys, *arguments, "--root", root, code=2)
    assert f"'{root}' (allowed: a folder that is there)" in refused


def test_a_list_of_runs_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = tmp_path / "runs.txt"
    given = ["collect", f"@{listed}", "--out", str(tmp_path / "out")]
    assert f"{listed}: cannot be read: No such file" in printed_by(capsys, *given, code=2)
    listed.write_bytes(b"\xff\n")
    assert f"{listed}: is not valid UTF-8" in printed_by(capsys, *given, code=2)
    listed.write_text("")
    assert f"{listed}: lists no runs (allowed: run folders, one a line)" in printed_by(capsys, *given, code=2)
    listed.write_text(f"@{listed}\n")  # a name like any other, and no list
    assert "spec.json: cannot be read" in printed_by(capsys, *given, code=2)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--suite", "smoke"], "--out: is missing (allowed: a folder)"),
        (
            ["--suite", "smoke", "--out", "x", "--ranks", "8"],
            "--ranks: is not for --suite (allowed: --out, --sbatch)",
        ),
        (["--scheme", "zero3", "--to", "fsdp2"], "--ranks: is missing (allowed: over how many ranks)"),
        (["--scheme", "zero3", "--ranks", "8"], "--to: is missing (allowed: deepspeed, fsdp2)"),
        (
            ["--scheme", "zero3", "--out", "x"],
            "--out: is not for --scheme (allowed: --ranks, --to, --cluster)",
        ),
        (
            ["--from", "x.json", "--ranks", "8", "--to", "fsdp2"],
            "--to: is not for --from (allowed: --ranks, --cluster)",
        ),
    ],
)
def test_what_spec_would_ignore_is_refused(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed_by(capsys, "spec", "--root", str(ROOT), *arguments, code=2) == f"lowband: {says}"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            [*PREDICT, "--interleave", "4"],
            "--interleave: would change nothing (allowed: with --pp 2 or more)",
        ),
        ([*PREDICT, "--copies", "0", "2"], "--copies: would change nothing (allowed: with --ep 2 or more)"),
        (
            [*PREDICT, "--recompute", "none", "--recompute-layers", "3"],
            "--recompute-layers: would change nothing "
            "(allowed: with --recompute selective, op, full or host)",
        ),
        (
            [*PLAN, "--global-batch", "10000001"],
            "--global-batch: 10,000,001 sequences (allowed: at most 10,000,000)",
        ),
        ([*PREDICT, "--imbalance", "2"], "--imbalance: would change nothing (allowed: with --ep 2 or more)"),
        ([*PREDICT, "--route", "flat"], "--route: would change nothing (allowed: with --ep 2 or more)"),
        ([*PREDICT, "--ways", "heads"], "--ways: would change nothing (allowed: with --cp 2 or more)"),
        ([*PREDICT, "--states", "scan"], "--states: would change nothing (allowed: with --cp 2 or more)"),
        (
            [*PREDICT, "--sequence-parallel"],
            "--sequence-parallel: would change nothing (allowed: with --tp 2 or more)",
        ),
        (
            [*PREDICT, "--tiers", "weights@host", "--tier-share", "0.5"],
            "--tier-share and --tier-stride are of --tiers (allowed: --tiers optim@host)",
        ),
        ([*PLAN, "--imbalance", "2"], "--imbalance: would change nothing (allowed: with --ep 2 or more)"),
        ([*PLAN, "--copies", "2"], "--copies: would change nothing (allowed: with --ep 2 or more)"),
        (
            [*PLAN, "--ways", "heads", "--cp", "1"],
            "--ways: would change nothing (allowed: with --cp 2 or more)",
        ),
        (
            [*PLAN, "--cp", "2", "--states", "scan"],
            "--states: model 'gpt-1m' has no linear layers (allowed: models with some, or no --states)",
        ),
        ([*PLAN, "--most-stale", "9"], "--most-stale: would change nothing (allowed: with --outer-gbps)"),
        (
            [*PLAN, "--groups", "1000000000000"],
            "--groups: groups of 1,000,000,000,000 ranks in a job of 8 "
            "(allowed: fewer than those, that divide them)",
        ),
        ([*PLAN, "--largest", "--recompute", "none"], "--largest is without --recompute"),
        ([*PLAN, "--largest", "--imbalance", "2"], "--largest is without --imbalance"),
        ([*PLAN, "--outer-gbps", "1", "--ways", "heads"], "--outer-gbps is without --ways"),
        ([*PLAN, "--largest", "--groups", "16"], "--largest is without --groups"),
        ([*PLAN, "--outer-gbps", "1", "--largest"], "--outer-gbps is without --largest"),
        ([*PLAN, "--outer-gbps", "1", "--software", "any"], "--outer-gbps is without --software"),
    ],
)
def test_an_option_without_effect_or_end_is_refused(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert printed_by(capsys, *arguments, code=2) == f"lowband: {says}"


def test_a_suite_named_twice_is_written_once(tmp_path: Path) -> None:
    given = ["spec", "--root", str(ROOT), "--suite", "smoke", "smoke", "--out", str(tmp_path)]
    assert main(given) == 0
    assert len([*tmp_path.iterdir()]) == 9


def test_a_folder_in_a_file_s_place_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    job = ["--cluster", "frontier", "--model", "gpt-1m", "--gpus", "8", "--scheme", "zero3"]
    said = printed_by(capsys, "advise-page", *job, "--out", str(tmp_path), code=2)
    assert said == f"lowband: {tmp_path}: Is a directory"


@pytest.mark.parametrize("limit", ["-1", "nan", "1e9"])
def test_the_time_limit_of_kernels_is_one(
    limit: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    given = ["bench-kernel", "--device", "cpu", "--out", str(out), "--limit-s", limit]
    assert "(allowed: above 0, at most 86400 seconds)" in printed_by(capsys, *given, code=2)
    assert not out.exists()


@pytest.mark.parametrize(
    "arguments",
    [["faults"], ["validate", "--lengths"], ["calibrate", "--folds"], ["simulate", "--python", "none"]],
    ids=lambda words: words[0],
)
def test_what_cannot_be_written_ends_before_it_runs(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    assert printed_by(capsys, *arguments, "--out", str(taken), code=2) == f"lowband: {taken}: File exists"


def test_a_plan_is_written_whole_or_not_at_all(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    suites = tmp_path / "config" / "suites"
    suites.parent.mkdir()
    suites.write_text("a file in the folder's place")
    job = [*PLAN, "--tp", "1", "--pp", "1", "--micro-batch", "1", "--recompute", "full"]
    assert str(suites) in printed_by(capsys, *job, "--write", "mine", "--root", str(tmp_path), code=2)
    assert not [*tmp_path.rglob("mine.yaml")]


def test_slow_nodes_have_the_software_that_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """What the stack computes otherwise was ignored."""
    job = ["plan", "--cluster", "frontier", "--model", "gpt-1m", "--gpus", "16", "--outer-gbps", "1", "--csv"]
    found = []
    for more in ([], ["--attention", "plain"]):
        found.append(printed_by(capsys, *job, "--root", str(ROOT), *more))
    assert found[0] != found[1]


@pytest.mark.parametrize(
    ("options", "refused"),
    [
        (["--schedule", "zb-h1"], "--schedule: would change nothing (allowed: with --pp 2 or more)"),
        (["--ep", "2", "--imbalance", "3"], "--imbalance: 3 (allowed: 1 to 2, the ranks of --ep"),
    ],
)
def test_what_no_point_would_show_is_refused(
    options: list[str], refused: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [*PREDICT, "--model", "mixtral-8x7b", "--seq", "2048", *options]
    assert refused in printed_by(capsys, *given, code=2)


def test_the_load_of_the_fullest_rank_is_at_most_all(capsys: pytest.CaptureFixture[str]) -> None:
    given = [*PREDICT, "--model", "mixtral-8x7b", "--ep", "2", "8", "--imbalance", "3", "--json"]
    rows = json.loads(printed_by(capsys, *given, code=1))
    assert [row["experts"]["imbalance"] for row in rows] == [2, 3]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--global-batch", "12"], "--global-batch: 12 sequences (allowed: a multiple of 8: ranks x micro"),
        (["--global-batch", "3"], "--global-batch: 3 sequences"),
        (["--micro-batch", "1000000"], "no model of the family of gpt-1m fits at micro-batch 1000000"),
    ],
)  # fmt: skip
def test_a_batch_for_which_there_is_no_largest_model(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in printed_by(capsys, *PLAN, "--largest", *options, code=2)


def test_with_strict_no_largest_model_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed_by(capsys, *PLAN, "--largest", "--micro-batch", "1000000", "--strict", code=1) == ""


def test_a_grid_says_of_which_layers(capsys: pytest.CaptureFixture[str]) -> None:
    of_three = ["--recompute", "none", "full", "--recompute-layers", "3"]
    header, none, full = printed_by(capsys, *PREDICT, *of_three).splitlines()[2:5]
    column = slice(header.index("recompute"), header.index("step (s)"))
    assert (none[column].strip(), full[column].strip()) == ("none", "full of 6.82 % of the layers")
