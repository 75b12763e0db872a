"""`snakemake --profile slurm` in a box, for real: it trains, and it survives what happens to jobs."""

import json
import shlex
import sys
from pathlib import Path

import pytest
from commands import MACHINE, SUITE, WORKFLOW, in_small_box, lowband

from lowband.spec.csv_tables import read_table

pytestmark = [pytest.mark.usefixtures("with_slurm"), pytest.mark.waits]


STATUS = {"failed": "FAILED", "cancelled": "CANCELLED", "timed_out": "TIMEOUT", "lost": "NODE_FAIL"}


@pytest.mark.parametrize(
    "hows", [("failed",), pytest.param(tuple(STATUS), marks=pytest.mark.wide)], ids="-".join
)
def test_jobs_that_end_badly_are_told_and_a_rerun_completes_them(hows: tuple[str, ...], tree: Path) -> None:
    """A rank killed, cancelled, out of time, node lost, each on a node; one job more waits for a node."""
    box, suite = tree / "slurm" / "small-box" / "machine.yaml", tree / "config" / "suites" / "faults.yaml"
    box.write_text(MACHINE.replace("nodes: 4", f"nodes: {len(hows)}"))
    suite.write_text(SUITE.replace("repeats: 5", f"repeats: {len(hows) + 1}"))
    job = [sys.executable, str(Path(__file__).with_name("faults_job.py")), "0", *hows]
    done = in_small_box(tree, *job, timeout=3000)
    told = json.loads(done.stdout.splitlines()[-1])
    bad = {told[how]: how for how in hows}
    [alone] = {*told["after"]} - {*bad}

    # The first time: every cause is told, and the last job went on to its end.
    assert told["first_code"] == 1
    for how in hows:
        assert f"SLURM status is: '{STATUS[how]}'" in told["first_log"], how
    assert "was killed by SIGKILL" in told["causes"][told["failed"]]["cause"]
    if "cancelled" in hows:
        assert "ended by SIGTERM" in told["causes"][told["cancelled"]]["cause"]
    assert told["causes"][alone]["status"] == "ok"

    # The second: only what was missing, each from its last checkpoint.
    assert told["again_code"] == 0, told["again_log"]
    assert f"run={alone}" not in told["again_log"]
    assert told["after"][alone] == told["causes"][alone]
    for run in bad:
        assert told["after"][run]["status"] == "ok"
        assert told["after"][run]["resumed_from"] >= 2, run
    runs = read_table(tree / "results" / "faults" / "tables" / "runs.csv")
    assert list(runs["status"]) == ["ok"] * (len(hows) + 1)
    assert set(runs["links"]) == {"shaped"}


def test_ranks_over_two_nodes_train_as_without_slurm(tree: Path) -> None:
    """Weights over a package, optimizer over 2 nodes, through srun: the weights that plain loopback gives."""
    suite = (
        SUITE.replace("repeats: 5", "repeats: 1")
        .replace("ranks: 2", "ranks: 4")
        .replace("steps: 12", "steps: 3")
    )
    (tree / "config" / "suites" / "faults.yaml").write_text(suite.replace("scheme: zero3", "scheme: hsdp2"))
    schemes = tree / "config" / "schemes.yaml"
    schemes.write_text(schemes.read_text() + "\nhsdp2: {weights: package, grads: package, optim: world}\n")
    run = "results/faults/runs/faults-gpt-200k-hsdp2-n0004-b2-s32-r1"
    jobs = [sys.executable, "-m", "lowband", "box", "jobs", "results/faults/runs", "--out", "jobs.csv"]
    in_small_box(tree, "bash", "-c", f"{shlex.join(WORKFLOW)} && {shlex.join(jobs)}")
    [job] = read_table(tree / "jobs.csv").to_dict("records")
    assert (job["run_id"], job["ranks"], job["nodes"]) == (Path(run).name, 4, 2)
    assert min(job["before_s"], job["wall_s"], job["after_s"]) > 0
    assert job["added_s"] == pytest.approx(job["waited_s"] + job["before_s"] + job["after_s"])
    through_slurm = json.loads((tree / run / "outcome.json").read_text())
    env = json.loads((tree / run / "env.json").read_text())
    assert env["hosts"] == ["node1", "node2"]
    assert env["links"] == "shaped"
    again = lowband("train", f"{run}/spec.json", "--links", "plain", "--again", cwd=tree)
    assert again.returncode == 0
    local = json.loads((tree / run / "outcome.json").read_text())
    assert local["weights_sha256"] == through_slurm["weights_sha256"] != ""


@pytest.mark.wide
def test_nodes_of_one_rank_train(tree: Path) -> None:
    """Snakemake's executor refuses jobs of one task a node, and is told of two."""
    thin = MACHINE.replace("{name: package, size: 2,", "{name: node, size: 1,")
    (tree / "slurm" / "small-box" / "machine.yaml").write_text(thin)
    suite = SUITE.replace("repeats: 5", "repeats: 1").replace("steps: 12", "steps: 3")
    (tree / "config" / "suites" / "faults.yaml").write_text(suite)
    in_small_box(tree, *WORKFLOW)
    [env] = (tree / "results" / "faults" / "runs").glob("*/env.json")
    found = json.loads(env.read_text())
    assert (found["hosts"], found["links"]) == (["node1", "node2"], "shaped")


@pytest.mark.wide
def test_runs_that_share_a_job_continue_where_one_failed(tree: Path) -> None:
    """Two runs in one Slurm job, a job step each; the second job starts the one that failed, and no other."""
    (tree / "slurm" / "small-box" / "job.yaml").write_text("tasks: node\njob_of: nodes\ncpus_per_rank: 1\n")
    suite = SUITE.replace("repeats: 5", "repeats: 1").replace("steps: 12", "steps: 3")
    suite = suite.replace("checkpoint_every: 2, ", "") + "axes: {text: [stdlib, text.txt], seed: [1]}\n"
    (tree / "config" / "suites" / "faults.yaml").write_text(suite)
    (tree / "text.txt").write_text("too short")
    workflow = shlex.join(WORKFLOW)
    mend = "cat src/lowband/*.py src/lowband/spec/*.py > text.txt"
    script = f"! {workflow} && {mend} && {workflow} && scontrol show job > jobs.txt"
    in_small_box(tree, "bash", "-c", script)
    assert list(read_table(tree / "results" / "faults" / "tables" / "runs.csv")["status"]) == ["ok"] * 2
    jobs = (tree / "jobs.txt").read_text()
    assert (jobs.count("JobId="), jobs.count("JobState=COMPLETED")) == (2, 1)
    log = (tree / "logs" / "faults" / "train" / "small-box_1_nodes.log").read_text()  # of the second job
    [bad] = [path.name for path in (tree / "results" / "faults" / "runs").glob("*text.txt*")]
    assert [line for line in log.splitlines() if line.endswith(": starts")] == [f"lowband: {bad}: starts"]
    env = json.loads((tree / "results" / "faults" / "runs" / bad / "env.json").read_text())
    assert env["links"] == "shaped"


def test_a_run_with_other_links_than_the_box_is_refused(tree: Path) -> None:
    suite = SUITE.replace("repeats: 5", "repeats: 1").replace("steps: 12", "steps: 2, outer_link: 0.5")
    (tree / "config" / "suites" / "faults.yaml").write_text(suite)
    assert lowband("spec", "--suite", "faults", "--out", "runs", cwd=tree).returncode == 0
    [spec] = (tree / "runs").glob("*/spec.json")
    srun = ["srun", "-N1", "-n1", sys.executable, "-m", "lowband", "train", str(spec)]
    done = lowband(
        "box", "run", "--cluster", "small-box", "--", "env", "MASTER_ADDR=x", "MASTER_PORT=1", *srun, cwd=tree
    )
    assert done.returncode != 0
    assert "this box has other links than the run" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (spec.parent / "outcome.json").exists()
