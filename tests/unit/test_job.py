"""What Slurm is asked for, from a run and a cluster's job.yaml."""

from pathlib import Path

import pytest

from lowband.errors import UserError
from lowband.spec.job import Job, is_slurm_task, read_job
from lowband.spec.run import RunSpec
from lowband.spec.suites import expand

ROOT = Path(__file__).parents[2]
RUN = next(spec for spec in expand(ROOT, ["frontier"]) if spec.ranks == 384)


def run(**changes: object) -> RunSpec:
    return RunSpec.parse({**RUN.model_dump(), **changes}, "test")


@pytest.mark.parametrize("cluster", sorted(path.parent.name for path in ROOT.glob("slurm/*/machine.yaml")))
def test_every_cluster_has_a_job(cluster: str) -> None:
    assert read_job(ROOT, cluster).cpus_per_rank >= 1


def test_whole_nodes_and_a_margin_of_time() -> None:
    job = read_job(ROOT, "frontier")
    assert job.resources(run(ranks=12 * 8, time_limit_s=601))["nodes"] == 12
    assert job.resources(run(time_limit_s=601))["runtime"] == 11 + 10
    assert job.tasks_per_node(run()) == 8
    assert read_job(ROOT, "frontier-box").tasks_per_node(run()) == 1


@pytest.mark.parametrize("suite", ["volume", "volume3072"])
def test_a_count_is_one_task_whatever_it_counts(suite: str) -> None:
    job = read_job(ROOT, "frontier")
    specs = expand(ROOT, [suite])
    assert specs
    for spec in specs:
        assert (spec.device, spec.ranks >= 384) == ("fake", True)
        asked = job.resources(spec)
        assert (asked["nodes"], asked["tasks_per_node"], job.tasks_per_node(spec)) == (1, 1, 1)


def test_queue_limits() -> None:
    job = read_job(ROOT, "frontier")
    assert job.resources(run(ranks=91 * 8, time_limit_s=110 * 60))["runtime"] == 120
    with pytest.raises(UserError, match=r"121 minutes on 91 nodes .allowed: 120 minutes at most"):
        job.resources(run(ranks=91 * 8, time_limit_s=111 * 60))
    assert job.resources(run(ranks=92 * 8, time_limit_s=111 * 60))["runtime"] == 121
    with pytest.raises(UserError, match="allowed: 9856 at most"):
        job.resources(run(ranks=9857 * 8))


def test_an_unknown_key_is_refused() -> None:
    with pytest.raises(UserError, match="acount"):
        Job.parse({"tasks": "rank", "cpus_per_rank": 1, "acount": "abc"}, "job.yaml")


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
