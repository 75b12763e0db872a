"""The lines that the profiles submit on a real site, read by a stand-in for sbatch. Nothing is scheduled."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("Snakefile", "workflow", "config", "envs", "slurm", "src", "results/reported", "results/reference")

# Writes down its arguments and refuses, so that the workflow ends at once.
SBATCH = '#!/bin/sh\nprintf "%s\\n" "$*" >> "$SUBMITTED"\necho "sbatch: error: a stand-in" >&2\nexit 1\n'


def submit(tree: Path, profile: str, runs: list[str], **variables: str) -> dict[str, str]:
    """Submit runs with a profile; the sbatch lines by run."""
    for part in PARTS:
        source = ROOT / part
        copy = shutil.copytree if source.is_dir() else shutil.copy2
        (tree / part).parent.mkdir(parents=True, exist_ok=True)
        copy(source, tree / part)
    commands = tree / "commands"
    commands.mkdir()
    for name in ("sbatch", "squeue", "sacct", "sacctmgr", "sshare", "scancel"):
        (commands / name).write_text(SBATCH if name == "sbatch" else "#!/bin/sh\n")
        (commands / name).chmod(0o755)
    submitted = tree / "submitted"
    suite = profile.rpartition("/")[2]
    targets = [f"results/{suite}/runs/{run}/trained" for run in runs]
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--profile", profile, "--", *targets],
        cwd=tree,
        env={
            **os.environ, "PYTHONPATH": str(tree / "src"), "PATH": f"{commands}:{os.environ['PATH']}",
            "SUBMITTED": str(submitted), **variables,
        },
        capture_output=True,
        text=True,
        timeout=200,
    )  # fmt: skip
    assert done.returncode == 1
    assert submitted.exists(), done.stdout + done.stderr
    lines = submitted.read_text().split("--parsable")[1:]
    return {run: next(line for line in lines if f"runs/{run}/" in line or run in line) for run in runs}


@pytest.mark.slow
def test_frontier_submits_whole_nodes_with_olcfs_options(tmp_path: Path) -> None:
    """1, 2, 12 and 48 nodes."""
    runs = {ranks: f"frontier-gpt-20b-hier3-n{ranks:04d}-b1-s2048-r1" for ranks in (8, 16, 96, 384)}
    lines = submit(tmp_path, "slurm/frontier", list(runs.values()), SLURM_PROJECT="abc123")
    for ranks, run in runs.items():
        line = lines[run]
        for option in (
            f"--nodes={ranks // 8}", "--ntasks-per-node=8", "--cpus-per-task=7", "-A 'abc123'", "-p batch",
            "-C nvme", "-t 27", "--gpus-per-node=8", "--core-spec=8", "--exclusive",
            "--network=disable_rdzv_get",
        ):  # fmt: skip
            assert option.replace("'", "") in line.replace("'", ""), (option, line)
        assert "--mem " not in line  # whole nodes: a limit would starve the job
        assert "--gpus " not in line


@pytest.mark.slow
def test_generic_site_submits_without_an_account(tmp_path: Path) -> None:
    run = "cuda-gpt-10b-zeropp-n0016-b1-s2048-r1"
    line = submit(tmp_path, "slurm/cuda", [run], SLURM_PART="gpu")[run]
    for option in ("--nodes=2", "--ntasks-per-node=8", "-p gpu", "--gpus-per-node=8"):
        assert option in line.replace("'", ""), (option, line)
    assert "$" not in line.partition("--wrap")[0]  # no variable was left as text


def test_launch_script_starts_a_task_per_rank_or_per_node(tmp_path: Path) -> None:
    """slurm/launch.sh: srun inside of a job, the command itself elsewhere."""
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$MASTER_ADDR $MASTER_PORT srun $*"\n')
    (tmp_path / "srun").chmod(0o755)
    command = [str(ROOT / "slurm" / "launch.sh"), "cuda", "2", "8", "--gpus-per-task=1 -c8", "echo", "a b"]
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    env = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")} | path
    outside = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=20)
    assert outside.stdout == "a b\n"
    inside = subprocess.run(
        command, cwd=ROOT, env={**env, "SLURM_JOB_ID": "1"}, capture_output=True, text=True, timeout=20
    )
    address, port, rest = inside.stdout.split(maxsplit=2)
    assert address.count(".") == 3
    assert port == "29500"
    assert rest == "srun --nodes=2 --ntasks-per-node=8 --gpus-per-task=1 -c8 echo a b\n"
