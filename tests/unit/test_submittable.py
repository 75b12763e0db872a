"""What is refused before a job is submitted, and the script of a run that is submitted by hand."""

import subprocess
from pathlib import Path

import pytest

from lowband.box import network
from lowband.errors import UserError
from lowband.run import submit
from tests.checkout import CONFIG, ROOT
from tests.printed import printed_by


def check(suite: str, **variables: str) -> None:
    specs = CONFIG.runs([suite])
    cluster = specs[0].machine.name
    submit.check(specs, {cluster: CONFIG.job(cluster)}, variables, ROOT)


@pytest.fixture
def in_box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As inside of Frontier's box, whose controller answers."""
    machine = tmp_path / "machine.json"
    machine.write_text(CONFIG.machine("frontier-box").to_json())
    monkeypatch.setattr(network, "MACHINE", machine)
    monkeypatch.setattr(submit, "why_not", lambda: "")


@pytest.fixture
def at_site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "MACHINE", tmp_path / "none")
    monkeypatch.setattr(submit, "why_not", lambda: "")
    monkeypatch.setattr(submit, "accounts", set)


@pytest.mark.usefixtures("in_box")
def test_in_a_box_runs_of_its_links_are_submitted_and_others_are_not() -> None:
    check("box")
    check("default")  # of no box: on whatever a node has
    with pytest.raises(
        UserError, match=r"^links-.*: this box has other links than the run .allowed: a run with"
    ):
        check("links")
    with pytest.raises(UserError, match="this box has other links"):
        check("box-attained")  # another box's


@pytest.mark.usefixtures("at_site")
def test_at_a_site_runs_of_a_box_and_jobs_without_an_account_are_refused() -> None:
    with pytest.raises(UserError, match=r"for a box .frontier-box., .*--profile slurm/frontier"):
        check("links")
    with pytest.raises(UserError, match="slurm/lumi: SLURM_PROJECT is not set"):
        check("lumi")
    with pytest.raises(UserError, match="SLURM_PROJECT is not set"):
        check("lumi", SLURM_PROJECT="")
    check("lumi", SLURM_PROJECT="abc")


@pytest.mark.usefixtures("at_site")
def test_an_account_that_slurm_does_not_know_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "accounts", lambda: {"abc123", "abd"})
    with pytest.raises(UserError, match=r"SLURM_PROJECT: Slurm has no account 'abc124' .*: abc123, abd"):
        check("lumi", SLURM_PROJECT="abc124")
    check("lumi", SLURM_PROJECT="ABC123")  # Slurm's accounts have small letters
    monkeypatch.setattr(submit, "accounts", set)  # a site that does not tell
    check("lumi", SLURM_PROJECT="abc124")


def test_a_script_has_a_clean_environment_and_the_workflows_launch_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SLURM_PROJECT", "abc123")
    monkeypatch.setenv("SLURM_PART", "dev-g")
    monkeypatch.setenv("LOWBAND_SIF", "a b.sif")
    [script] = printed_by(capsys, "spec", "--suite", "lumi-first", "--sbatch", "--out", str(tmp_path)).split()
    text = Path(script).read_text()
    lines = text.splitlines()
    assert {
        "#SBATCH --export=NONE",
        "#SBATCH --no-requeue",
        "#SBATCH --account=abc123",
        "#SBATCH --partition=dev-g",
    } <= set(lines)
    assert "export LOWBAND_SIF='a b.sif'" in lines
    assert "LOWBAND_ENV_TAR" not in text
    # The shell runs what it would run, with a stand-in for the launcher.
    (tmp_path / "slurm").mkdir()
    launch = tmp_path / "slurm" / "launch.sh"
    launch.write_text('#!/bin/sh\nprintf "%s\\n" "$LOWBAND_SIF" "$PYTHONPATH" "$@"\n')
    launch.chmod(0o755)
    done = subprocess.run(["bash", script], cwd=tmp_path, capture_output=True, text=True)
    spec = CONFIG.runs(["lumi-first"])[0]
    assert done.stdout.splitlines() == [
        "a b.sif", str(tmp_path / "src"), "lumi", "1", "8", CONFIG.job("lumi").srun.strip(),
        "python", "-m", "lowband", "train", str(tmp_path / spec.run_id / "spec.json"),
    ]  # fmt: skip


def test_a_boxs_script_needs_no_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("SLURM_PROJECT", raising=False)
    script, *_ = printed_by(capsys, "spec", "--suite", "box-hops", "--sbatch", "--out", str(tmp_path)).split()
    assert "--account" not in Path(script).read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--suite", "frontier-first"], "SLURM_PROJECT: is not set"),
        (["--suite", "smoke"], "--sbatch: cluster 'local' has no job.yaml"),
        (["--scheme", "hier3"], "--sbatch: is not for --scheme (allowed: --ranks, --to, --cluster)"),
    ],
)
def test_a_script_that_cannot_be_is_refused_and_nothing_written(
    arguments: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("SLURM_PROJECT", raising=False)
    assert says in printed_by(capsys, "spec", *arguments, "--sbatch", "--out", str(tmp_path / "out"), code=2)
    assert not (tmp_path / "out").exists()
