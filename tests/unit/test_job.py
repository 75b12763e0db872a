"""What Slurm is asked for, from a run and a cluster's job.yaml."""

import re

import pytest
from snakemake_executor_plugin_slurm.validation import get_forbidden_slurm_options

from lowband.errors import UserError
from lowband.evidence.report.documents.code import suites
from lowband.run.ranks import job_id, step_name
from lowband.spec.batch_script import sbatch_options
from lowband.spec.job import SlurmRequest
from lowband.spec.run import RunSpec
from lowband.spec.slurm_task import is_slurm_task
from tests.checkout import CONFIG, ROOT

LEAST = {"tasks": "rank", "cpus_per_rank": 1}
RUN = next(spec for spec in CONFIG.runs(["frontier"]) if spec.ranks == 384)


def run(**changes: object) -> RunSpec:
    return RunSpec.parse({**RUN.model_dump(), **changes}, "test")


@pytest.mark.parametrize("cluster", sorted(path.parent.name for path in ROOT.glob("slurm/*/machine.yaml")))
def test_every_cluster_has_a_job(cluster: str) -> None:
    assert CONFIG.job(cluster).cpus_per_rank >= 1


def test_whole_nodes_and_a_margin_of_time() -> None:
    job = CONFIG.job("frontier")
    assert job.resources(run(ranks=12 * 8, time_limit_s=601))["nodes"] == 12
    assert job.resources(run(time_limit_s=601))["runtime"] == 11 + 10
    assert job.tasks_per_node(run()) == 8
    assert CONFIG.job("frontier-box").tasks_per_node(run()) == 1


@pytest.mark.parametrize("suite", ["volume", "volume3072"])
def test_a_count_is_one_task_whatever_it_counts(suite: str) -> None:
    job = CONFIG.job("frontier")
    specs = CONFIG.runs([suite])
    assert specs
    for spec in specs:
        assert (spec.device, spec.ranks >= 384) == ("fake", True)
        asked = job.resources(spec)
        assert (asked["nodes"], job.tasks_per_node(spec)) == (1, 1)
        assert asked["tasks_per_node"] > 1  # Snakemake's executor refuses a job of one task


def test_what_each_suite_asks_for() -> None:
    """By hand: frontier has 108, 36 and 120 runs on 2, 12 and 48 nodes of 8 ranks, of 25 + 10 minutes."""
    head, _, *lines = suites(ROOT, ROOT)
    rows = {row[0].strip("`"): row[1:] for line in lines for row in [line.strip("| ").split(" | ")]}
    assert sorted(rows) == sorted(path.stem for path in (ROOT / "config" / "suites").glob("*.yaml"))
    assert head.strip("| ").split(" | ")[1:] == [
        "cluster", "runs", "ranks", "nodes of a run", "tasks of a run", "minutes of a run",
        "hours of all runs", "node-hours of all runs",
    ]  # fmt: skip
    node_hours = (108 * 2 + 36 * 12 + 120 * 48) * 35 / 60
    hours = f"{264 * 35 / 60:.1f}"
    assert rows["frontier"] == ["`frontier`", "264", "384", "48", "384", "35", hours, f"{node_hours:.1f}"]
    assert rows["volume"] == ["`frontier`", "6", "384", "1", "1", "25", "2.5", "2.5"]  # counted, by one task
    assert rows["smoke"] == ["`local`", "9", "8", "-", "-", "-", "-", "-"]


def test_queue_limits() -> None:
    job = CONFIG.job("frontier")
    assert job.resources(run(ranks=91 * 8, time_limit_s=110 * 60))["runtime"] == 120
    with pytest.raises(UserError, match=r"121 minutes on 91 nodes .allowed: 120 minutes at most, .*job.yaml"):
        job.resources(run(ranks=91 * 8, time_limit_s=111 * 60))
    assert job.resources(run(ranks=92 * 8, time_limit_s=111 * 60))["runtime"] == 121
    with pytest.raises(UserError, match="allowed: 9856 at most"):
        job.resources(run(ranks=9857 * 8))


def test_runs_on_as_many_nodes_share_a_job() -> None:
    """Their time limits add up, to the limit of the queue; counts and other clusters' runs share nothing."""
    job = CONFIG.job("frontier")
    short = [run(ranks=ranks, time_limit_s=600) for ranks in (384, 384, 16, 8)]
    shared = job.allocations([*short, *CONFIG.runs(["volume"])])
    assert [(one.name, len(one.runs), one.minutes) for one in shared] == [
        ("frontier_1_nodes", 1, 20), ("frontier_2_nodes", 1, 20), ("frontier_48_nodes", 2, 30),
    ]  # fmt: skip
    [long] = job.allocations([run(ranks=384)] * 5)
    assert (long.limits_minutes, long.minutes) == (5 * 25 + 10, 120)
    assert CONFIG.job("cuda").allocations(CONFIG.runs(["cuda"])) == []


def test_a_node_of_one_rank_is_asked_for_as_the_executor_takes_it() -> None:
    """It submits no job of one task a node; of two equal options, sbatch takes the last."""
    [alone, *_] = CONFIG.runs(["wan"])
    assert alone.machine.node_size == 1
    job = SlurmRequest.parse({**LEAST, "account": False, "sbatch": "--exclusive"}, "x")
    for asked in (job.resources(alone), job.of_one_node(alone.machine, 1)):
        assert (asked["tasks_per_node"], asked["slurm_extra"]) == (2, "--exclusive --ntasks-per-node=1")
    tasks = [option for option in sbatch_options(job, alone, {}) if "tasks" in option]
    assert tasks == ["--ntasks-per-node=1"]
    assert CONFIG.job("frontier").resources(run())["slurm_extra"] == CONFIG.job("frontier").sbatch


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(UserError, match="acount"):
        SlurmRequest.parse({"tasks": "rank", "cpus_per_rank": 1, "acount": "abc"}, "job.yaml")


@pytest.mark.parametrize("pattern", get_forbidden_slurm_options())
def test_an_option_that_the_executor_refuses_is_refused_when_the_file_is_read(pattern: str) -> None:
    """The plugin's own list: patterns of a long option, some with a letter as well."""
    options = [
        part.replace("[=\\s]", "=1").replace("\\s?", " 1").replace("\\s", " 1") for part in pattern.split("|")
    ]
    for option in options:
        assert re.search(pattern, option)
        with pytest.raises(UserError, match=r"job.yaml: sbatch: no place for -"):
            SlurmRequest.parse({**LEAST, "sbatch": f"--exclusive {option}"}, "job.yaml")


@pytest.mark.parametrize(
    ("key", "options", "says"),
    [
        ("sbatch", "--exclusive --qos=regular", "no place for --qos: use the key qos"),
        ("sbatch", "-q regular", "no place for -q: use the key qos"),
        ("sbatch", "--chdir=x", "no place for --chdir: who submits the job sets it"),
        ("sbatch", "'--exclusive", "No closing quotation"),
        ("srun", "--distribution=cyclic", "no place for --distribution: slurm/launch.sh sets it"),
    ],
)
def test_an_option_that_is_given_elsewhere_is_refused_in_one_line(key: str, options: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        SlurmRequest.parse({**LEAST, key: options}, "slurm/x/job.yaml")
    assert str(refused.value).startswith(f"slurm/x/job.yaml: {key}: {says}")
    assert SlurmRequest.parse({**LEAST, "sbatch": "--gpus-per-node=8 --mem-bind=local"}, "x").sbatch


def test_the_environment_names_the_account_and_replaces_the_queue() -> None:
    job = SlurmRequest.parse({**LEAST, "partition": "batch", "qos": "regular"}, "x")
    assert job.queue({}) == {"slurm_partition": "batch", "qos": "regular"}
    mine = {"SLURM_PROJECT": "abc", "SLURM_PART": "dev", "SLURM_QOS": "debug"}
    assert job.queue(mine) == {"slurm_account": "abc", "slurm_partition": "dev", "qos": "debug"}
    without = SlurmRequest.parse({**LEAST, "account": False}, "x")
    assert without.queue(mine) == {"slurm_partition": "dev", "qos": "debug"}
    assert without.queue({"SLURM_PROJECT": "abc"}) == {}


@pytest.mark.parametrize(
    ("variable", "value"),
    [("SLURM_PROJECT", "a b"), ("SLURM_PROJECT", "a,b"), ("SLURM_PROJECT", " "), ("SLURM_QOS", "a\n")],
)
def test_what_is_no_name_of_an_account_or_queue_is_refused(variable: str, value: str) -> None:
    job = SlurmRequest.parse(LEAST, "x")
    with pytest.raises(UserError, match=f"^{variable}: .* is no name .allowed: "):
        job.queue({variable: value})
    assert job.queue({"SLURM_PART": "a,b"}) == {"slurm_partition": "a,b"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, False),
        ({"SLURM_JOB_ID": "1"}, False),  # a batch script
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1"}, False),  # srun --pty bash
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "1", "MASTER_ADDR": "a"}, True),
        ({"SLURM_PROCID": "3", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "8"}, True),
    ],
)
def test_the_shell_of_an_interactive_job_is_no_task(
    variables: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_PROCID", "SLURM_STEP_ID", "SLURM_NTASKS", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert is_slurm_task() is expected


def test_a_job_that_slurm_runs_again_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number and its steps' are the same."""
    for name, value in {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    first = job_id(), step_name()
    assert first[1] == "7.0"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert (job_id() != first[0], step_name()) == (True, "7.0.1")
