"""The lines that the profiles submit on a real site, read by a stand-in for sbatch. Nothing is scheduled.

The stand-in hands each line to the machine's own sbatch, whose controller does not exist: what its parser
does not know, it says before it looks for a controller.
"""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import pytest
import trees
from trees import copy_tree

from lowband.run.submit import why_not
from lowband.spec.batch_script import batch_script, sbatch_options
from lowband.spec.job import ACCOUNT, PARTITION, QOS
from tests.called import called
from tests.checkout import CONFIG, ROOT

FIRST = (ROOT / "docs" / "sites.md").read_text()
SITES = ("cuda", "frontier", "lumi", "perlmutter")
VERSION = "slurm-wlm 22.05.8"  # Debian 12's, whose parser reads the lines
PARSED = "allocation failure: Unable to contact slurm controller (connect failure)"

# Writes down its arguments, has them parsed, and refuses, so that the workflow ends at once.
SBATCH = """#!/bin/sh
printf "%s\\037" "$@" >> "$SUBMITTED"
printf "\\036" >> "$SUBMITTED"
if [ -n "$PARSER" ]; then "$PARSER" --test-only "$@" >> "$SUBMITTED.parsed" 2>&1; fi
echo "sbatch: error: a stand-in" >&2
exit 1
"""
SCONTROL = "#!/bin/sh\necho 'Slurmctld(primary) at a stand-in is UP'\n"


@pytest.fixture
def parser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Debian's sbatch, configured with GPUs, and with a controller at whose port nobody listens."""
    sbatch = shutil.which("sbatch")
    if sbatch is None:
        pytest.skip("no sbatch, whose parser would read the lines: make box-deps")
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        configuration = tmp_path / "slurm.conf"
        configuration.write_text(
            f"ClusterName=none\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort={held.getsockname()[1]}\n"
            "AuthType=auth/none\nMessageTimeout=1\nGresTypes=gpu\nAllowSpecResourcesUsage=YES\n"
            "SelectType=select/cons_tres\nTaskPlugin=task/affinity\n"
            "NodeName=n1\nPartitionName=batch Nodes=ALL\n"
        )
        monkeypatch.setenv("SLURM_CONF", str(configuration))
        version = subprocess.run([sbatch, "--version"], capture_output=True, text=True).stdout.strip()
        if version != VERSION:
            pytest.skip(f"{version}: another parser than that of {VERSION}")
        yield sbatch


def started(tree: Path, profile: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Start the workflow in a copy of the tree, with stand-ins for the commands of Slurm."""
    tree.mkdir(exist_ok=True)
    copy_tree(tree)
    commands = tree / "commands"
    commands.mkdir()
    for name in ("sbatch", "scontrol", "squeue", "sacct", "sacctmgr", "sshare", "scancel", "sinfo"):
        (commands / name).write_text({"sbatch": SBATCH, "scontrol": SCONTROL}.get(name, "#!/bin/sh\n"))
        (commands / name).chmod(0o755)
    inherited = {key: value for key, value in os.environ.items() if key not in (ACCOUNT, PARTITION, QOS)}
    return subprocess.run(
        [trees.python(), "-m", "snakemake", "--profile", profile, *arguments],
        cwd=tree,
        env={
            **inherited, "PYTHONPATH": str(tree / "src"), "PATH": f"{commands}:{os.environ['PATH']}",
            "SUBMITTED": str(tree / "submitted"), "PARSER": "", **variables,
        },
        capture_output=True,
        text=True,
        timeout=600,
    )  # fmt: skip


def submit(tree: Path, profile: str, runs: Mapping[str, str], **variables: str) -> dict[str, list[str]]:
    """Submit runs, given what their jobs are called, with a profile; by run the options, in long form."""
    suite = profile.rpartition("/")[2]
    targets = [f"results/{suite}/runs/{run}/trained" for run in runs]
    done = started(
        tree, profile, "--seconds-between-status-checks", "1",
        "--slurm-init-seconds-before-status-checks", "1", "--", *targets, **variables,
    )  # fmt: skip
    assert done.returncode == 1
    assert (tree / "submitted").exists(), done.stdout + done.stderr
    calls = [call.split("\037")[:-1] for call in (tree / "submitted").read_text().split("\036")[:-1]]
    of_run = {run: [c for c in calls if any(job in word for word in c)] for run, job in runs.items()}
    return {run: long_options(of_run[run][0]) for run in runs}


LONG = {"-A": "--account", "-p": "--partition", "-C": "--constraint", "-t": "--time"}


def long_options(call: list[str]) -> list[str]:
    following = dict(pairwise(call))
    return [f"{LONG[word]}={following[word]}" if word in LONG else word for word in call]


@pytest.mark.waits
@pytest.mark.parametrize("site", SITES)
def test_a_site_submits_what_the_script_says_and_debians_slurm_understands(
    site: str, tmp_path: Path, parser: str, request: pytest.FixtureRequest
) -> None:
    """The largest and the smallest run of each site's suite. On Frontier, where runs on as many nodes share a
    job, without --wide the largest alone."""
    specs, job = sorted(CONFIG.runs([site]), key=lambda spec: spec.ranks), CONFIG.job(site)
    both = [specs[0], specs[-1]]
    if site == "frontier" and not request.config.getoption("--wide"):
        del both[0]
    variables = {"SLURM_PROJECT": "abc123", "SLURM_QOS": "debug" if site == "cuda" else ""}
    shared = {run.run_id: each for each in job.allocations(specs) for run in each.runs}
    names = {s.run_id: f"train_{site}_{shared[s.run_id].nodes}_nodes" if shared else s.run_id for s in both}
    calls = submit(tmp_path / "tree", f"slurm/{site}", names, PARSER=parser, **variables)
    for spec in both:
        options = calls[spec.run_id]
        expected = sbatch_options(job, spec, variables)
        if shared:  # as long as all runs on as many nodes may take, or the queue allows
            minutes = f"--time={shared[spec.run_id].minutes}"
            expected = [minutes if option.startswith("--time=") else option for option in expected]
        assert set(expected) <= set(options)
        before = "".join(options).partition("--wrap")[0]
        assert "--mem" not in before  # whole nodes: a limit would starve the job
        assert "$" not in before  # no variable was left as text
    parsed = (tmp_path / "tree" / "submitted.parsed").read_text().splitlines()
    assert parsed == [PARSED] * len(both)


@pytest.mark.waits
def test_a_site_submits_the_benchmark_of_its_kernels(tmp_path: Path, parser: str) -> None:
    tree = tmp_path / "tree"
    at_once = ("--seconds-between-status-checks", "1", "--slurm-init-seconds-before-status-checks", "1")
    done = started(tree, "slurm/frontier", *at_once, "--", "kernels", PARSER=parser, SLURM_PROJECT="abc123")
    assert done.returncode == 1
    assert (tree / "submitted").exists(), done.stdout + done.stderr
    [call] = (tree / "submitted").read_text().split("\036")[:-1]
    options = long_options(call.split("\037")[:-1])
    job = CONFIG.job("frontier")
    assert {"--account=abc123", "--partition=batch", "--constraint=nvme", "--nodes=1"} <= set(options)
    assert {"--ntasks-per-node=8", "--cpus-per-task=7", *shlex.split(job.sbatch)} <= set(options)
    assert f"--time={10 + job.spare_minutes}" in options
    assert (tree / "submitted.parsed").read_text().splitlines() == [PARSED]


def test_frontiers_options_are_olcfs() -> None:
    """2, 12 and 48 nodes."""
    largest = {spec.ranks: spec for spec in CONFIG.runs(["frontier"])}
    for ranks, spec in largest.items():
        assert sbatch_options(CONFIG.job("frontier"), spec, {"SLURM_PROJECT": "abc123"}) == [
            "--account=abc123", "--partition=batch", "--constraint=nvme", f"--nodes={ranks // 8}",
            "--ntasks-per-node=8", "--cpus-per-task=7", "--time=35", "--gpus-per-node=8", "--core-spec=8",
            "--exclusive", "--network=disable_rdzv_get",
        ]  # fmt: skip


@pytest.mark.parametrize("site", SITES)
def test_debians_slurm_understands_a_sites_script_and_its_srun_line(
    site: str, tmp_path: Path, parser: str
) -> None:
    suite = f"{site}-first" if site != "cuda" else "cuda"
    spec = CONFIG.runs([suite])[0]
    script = tmp_path / "job.sbatch"
    variables = {"SLURM_PROJECT": "abc123"}
    script.write_text(
        batch_script(CONFIG.job(site), spec, Path("runs/x/spec.json"), Path(sys.executable), variables)
    )
    assert subprocess.run(["bash", "-n", script]).returncode == 0

    def said(*command: str | Path) -> str:
        return called(*command).stderr.strip()

    assert said(parser, "--test-only", script) == PARSED
    told = re.findall(rf"^\| {site} \| `sbatch (.*?)` \|", FIRST, re.MULTILINE | re.IGNORECASE)
    assert len(told) == (site != "cuda")
    for options in told:
        assert said(parser, "--test-only", *options.split(), script) == PARSED
    script.write_text(script.read_text().replace("--gpus-per-node", "--gpus-per-nodes"))
    assert "unrecognized option '--gpus-per-nodes=" in said(parser, "--test-only", script)
    job = CONFIG.job(site)
    srun = [Path(parser).with_name("srun"), "--kill-on-bad-exit=1", "--distribution=block", "--nodes=2"]
    srun += [f"--ntasks-per-node={job.tasks_per_node(spec)}", *shlex.split(job.srun)]
    assert said(*srun, "true") == "srun: error: Unable to allocate resources: " + PARSED.partition(": ")[2]
    assert "unrecognized option '--gpu-binds=" in said(*srun, "--gpu-binds=none", "true")


def test_debians_slurm_finds_the_log_of_a_run_whose_folder_has_a_space(tmp_path: Path, parser: str) -> None:
    spec, script = CONFIG.runs(["lumi-first"])[0], tmp_path / "job.sbatch"
    file, variables = Path("runs/my first/spec.json"), {"SLURM_PROJECT": "abc123"}
    script.write_text(batch_script(CONFIG.job("lumi"), spec, file, Path(sys.executable), variables))
    read = called(parser, "-v", "--test-only", script, cwd=tmp_path)
    assert f": {tmp_path}/runs/my first/%j.log\n" in read.stderr


def refused(done: subprocess.CompletedProcess[str], tree: Path) -> str:
    """The last line of a workflow that was refused while it was read, before its graph was made."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Building DAG" not in done.stderr
    assert not (tree / "submitted").exists()
    assert not (tree / "results" / "box").exists()
    return done.stderr.splitlines()[-1]


def test_outside_of_a_box_its_profile_names_those_of_sites(tmp_path: Path) -> None:
    line = refused(started(tmp_path, "slurm"), tmp_path)
    assert line == (
        "lowband: --profile: these runs are for a box (frontier-box), and this is none (allowed: lowband box "
        "run --cluster frontier-box -- snakemake ...; on a site --profile slurm/cuda, --profile "
        "slurm/frontier, --profile slurm/lumi, --profile slurm/perlmutter)"
    )


@pytest.mark.parametrize("site", [SITES[0], *(pytest.param(s, marks=pytest.mark.wide) for s in SITES[1:])])
def test_a_site_without_an_account_submits_nothing(site: str, tmp_path: Path) -> None:
    line = refused(started(tmp_path, f"slurm/{site}"), tmp_path)
    assert line.startswith(f"lowband: slurm/{site}: SLURM_PROJECT is not set")


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
        command, cwd=ROOT, env={**env, "SLURM_JOB_ID": "40001"}, capture_output=True, text=True, timeout=300
    )
    address, port, rest = inside.stdout.split(maxsplit=2)
    assert not address.startswith("127.")
    assert port == "10001"  # of 20,000 from 10,000 on: of another job another one
    assert rest == f"{SRUN} --gpu-bind=none -c8 echo a b\n"


def launched(tmp_path: Path, cluster: str, options: str, **more: str) -> str:
    """What a job prints that slurm/launch.sh starts, with stand-ins for what it calls."""
    command = [ROOT / "slurm" / "launch.sh", cluster, "2", "8", options, "train"]
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "USER": "u", **more}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_frontiers_environment_is_set_in_the_job(tmp_path: Path) -> None:
    """slurm/frontier/env.sh and stage.sh with stand-ins for what they call."""
    for name in ("srun", "sbcast", "module"):
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{name} $*" >> "{tmp_path}/calls"\nenv\n')
        (tmp_path / name).chmod(0o755)
    cray = {"CRAY_LD_LIBRARY_PATH": "/cray", "LOWBAND_ENV_TAR": "env.tar.gz"}
    printed = launched(tmp_path, "frontier", "--gpu-bind=closest", **cray)
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
    } <= set(printed.splitlines())
    made = next(call for call in calls if "mkdir -p /tmp/u-miopen-7" in call)
    assert made.endswith(" /tmp/u-torch-extensions-7 /tmp/u-triton-7 /tmp/u-inductor-7")


def test_an_nvidia_sites_environment_is_set_in_the_job(tmp_path: Path) -> None:
    (tmp_path / "srun").write_text("#!/bin/sh\nenv\n")
    (tmp_path / "srun").chmod(0o755)
    printed = launched(tmp_path, "cuda", "")
    assert {
        "PYTORCH_ALLOC_CONF=expandable_segments:True",
        "TRITON_CACHE_DIR=/tmp/u-triton-7",
        "TORCHINDUCTOR_CACHE_DIR=/tmp/u-inductor-7",
    } <= set(printed.splitlines())


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
    tree = tmp_path / "tree"
    programs = tmp_path / "programs"
    programs.mkdir()
    for folder in map(Path, os.environ["PATH"].split(os.pathsep)):
        for program in folder.glob("*"):
            if program.name != "sbatch" and not (programs / program.name).exists():
                (programs / program.name).symlink_to(program)
    done = started(tree, "slurm/frontier", SLURM_PROJECT="abc123", PATH=str(programs))
    assert refused(done, tree).startswith("lowband: no Slurm here: no program sbatch (allowed: ")
