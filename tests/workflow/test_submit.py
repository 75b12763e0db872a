"""The lines that the profiles submit on a real site, read by a stand-in for sbatch. Nothing is scheduled."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from trees import ROOT, copy_tree

from lowband.run.submit import why_not
from lowband.spec.config import Config

# Writes down its arguments and refuses, so that the workflow ends at once.
SBATCH = '#!/bin/sh\nprintf "%s\\n" "$*" >> "$SUBMITTED"\necho "sbatch: error: a stand-in" >&2\nexit 1\n'
SCONTROL = "#!/bin/sh\necho 'Slurmctld(primary) at a stand-in is UP'\n"


def submit(tree: Path, profile: str, runs: dict[str, str], **variables: str) -> dict[str, str]:
    """Submit runs, by names that their sbatch lines contain, with a profile; the lines by these names."""
    copy_tree(tree)
    commands = tree / "commands"
    commands.mkdir()
    for name in ("sbatch", "scontrol", "squeue", "sacct", "sacctmgr", "sshare", "scancel"):
        (commands / name).write_text({"sbatch": SBATCH, "scontrol": SCONTROL}.get(name, "#!/bin/sh\n"))
        (commands / name).chmod(0o755)
    submitted = tree / "submitted"
    suite = profile.rpartition("/")[2]
    targets = [f"results/{suite}/runs/{run}/trained" for run in runs.values()]
    done = subprocess.run(
        [
            sys.executable, "-m", "snakemake", "--profile", profile,
            "--seconds-between-status-checks", "1", "--", *targets,
        ],
        cwd=tree,
        env={
            **os.environ, "PYTHONPATH": str(tree / "src"), "PATH": f"{commands}:{os.environ['PATH']}",
            "SUBMITTED": str(submitted), **variables,
        },
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 1
    assert submitted.exists(), done.stdout + done.stderr
    lines = submitted.read_text().split("--parsable")[1:]
    assert len(lines) == len(runs)
    return {name: next(line for line in lines if name in line) for name in runs}


@pytest.mark.waits
def test_frontier_submits_whole_nodes_with_olcfs_options(tmp_path: Path) -> None:
    """2, 12 and 48 nodes: a job each for all runs on them, as long as the queue's limit."""
    first = {spec.ranks: spec.run_id for spec in reversed(Config(ROOT).runs(["frontier"]))}
    runs = {f"train_frontier_{ranks // 8}_nodes": first[ranks] for ranks in (16, 96, 384)}
    lines = submit(tmp_path, "slurm/frontier", runs, SLURM_PROJECT="abc123")
    for ranks, line in zip((16, 96, 384), lines.values(), strict=True):
        for option in (
            f"--nodes={ranks // 8}", "--ntasks-per-node=8", "--cpus-per-task=7", "-A 'abc123'", "-p batch",
            "-C nvme", "-t 120", "--gpus-per-node=8", "--core-spec=8", "--exclusive",
            "--network=disable_rdzv_get",
        ):  # fmt: skip
            assert option.replace("'", "") in line.replace("'", ""), (option, line)
        assert "--mem " not in line  # whole nodes: a limit would starve the job
        assert "--gpus " not in line


@pytest.mark.waits
def test_generic_site_submits_without_an_account(tmp_path: Path) -> None:
    run = "cuda-gpt-10b-zeropp-n0016-b1-s2048-r1"
    line = submit(tmp_path, "slurm/cuda", {run: run}, SLURM_PART="gpu")[run]
    for option in ("--nodes=2", "--ntasks-per-node=8", "-p gpu", "--gpus-per-node=8"):
        assert option in line.replace("'", ""), (option, line)
    assert "$" not in line.partition("--wrap")[0]  # no variable was left as text


# Ranks fill node after node, as the levels of the engine take them to.
SRUN = "srun --kill-on-bad-exit=1 --distribution=block --nodes=2 --ntasks-per-node=8"


def test_launch_script_starts_a_task_per_rank_or_per_node(tmp_path: Path) -> None:
    """slurm/launch.sh: srun inside of a job, the command itself elsewhere."""
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$MASTER_ADDR $MASTER_PORT srun $*"\n')
    (tmp_path / "srun").chmod(0o755)
    command = [str(ROOT / "slurm" / "launch.sh"), "cuda", "2", "8", "--gpu-bind=none -c8", "echo", "a b"]
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    env = {key: value for key, value in os.environ.items() if not key.startswith("SLURM_")} | path
    outside = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert outside.stdout == "a b\n"
    inside = subprocess.run(
        command, cwd=ROOT, env={**env, "SLURM_JOB_ID": "1"}, capture_output=True, text=True, timeout=300
    )
    address, port, rest = inside.stdout.split(maxsplit=2)
    assert not address.startswith("127.")
    assert port == "29500"
    assert rest == f"{SRUN} --gpu-bind=none -c8 echo a b\n"


def test_frontiers_environment_is_set_in_the_job(tmp_path: Path) -> None:
    """slurm/frontier/env.sh and stage.sh with stand-ins for what they call."""
    for name in ("srun", "sbcast", "module"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*" >> "{tmp_path}/calls"\nenv\n')
        (tmp_path / name).chmod(0o755)
    command = [str(ROOT / "slurm" / "launch.sh"), "frontier", "2", "8", "--gpu-bind=closest", "train"]
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "USER": "u",
        "CRAY_LD_LIBRARY_PATH": "/cray", "LOWBAND_ENV_TAR": "env.tar.gz",
    }  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0].startswith("module load PrgEnv-gnu")
    assert "sbcast --preserve --force env.tar.gz /mnt/bb/u/lowband-env.tar.gz" in calls
    assert calls[-1].startswith(f"{SRUN} --gpu-bind=closest train")
    assert {
        "NCCL_NET=OFI",
        "MASTER_PORT=3442",
        "FI_MR_CACHE_MONITOR=kdreg2",
        "LD_LIBRARY_PATH=/cray",
        "TRITON_CACHE_DIR=/tmp/u-triton-7",
        "TORCHINDUCTOR_CACHE_DIR=/tmp/u-inductor-7",
    } <= set(done.stdout.splitlines())
    made = next(call for call in calls if "mkdir -p /tmp/u-miopen-7" in call)
    assert made.endswith(" /tmp/u-torch-extensions-7 /tmp/u-triton-7 /tmp/u-inductor-7")


def test_an_nvidia_sites_environment_is_set_in_the_job(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\nenv\n")
    (tmp_path / "srun").chmod(0o755)
    command = [str(ROOT / "slurm" / "launch.sh"), "cuda", "2", "8", "", "train"]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "USER": "u"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert {
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
        "TRITON_CACHE_DIR=/tmp/u-triton-7",
        "TORCHINDUCTOR_CACHE_DIR=/tmp/u-inductor-7",
    } <= set(done.stdout.splitlines())


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("echo 'Slurmctld(primary) at x is UP'", ""),
        ("echo 'Slurmctld(primary) at x is DOWN'; exit 1", "Slurmctld(primary) at x is DOWN"),
        ("echo 'scontrol: error: Unknown host' >&2; exit 1", "scontrol: error: Unknown host"),
    ],
)
def test_a_controller_must_answer(
    script: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sbatch", "scontrol"):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert why_not() == (f"no controller answers scontrol ping: {reason}" if reason else "")


def test_without_slurm_one_line_says_so(tmp_path: Path) -> None:
    copy_tree(tmp_path)
    programs = tmp_path / "programs"
    programs.mkdir()
    for folder in map(Path, os.environ["PATH"].split(os.pathsep)):
        for program in folder.glob("*"):
            if program.name != "sbatch" and not (programs / program.name).exists():
                (programs / program.name).symlink_to(program)
    done = subprocess.run(
        [sys.executable, "-m", "snakemake", "--profile", "slurm", "--", "results/box/tables/runs.csv"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "src"), "PATH": str(programs)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("lowband: no Slurm here: no program sbatch (allowed: ")
    assert not (tmp_path / "results" / "box").exists()
