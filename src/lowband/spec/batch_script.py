"""A run as a batch script: what the workflow would submit, to be read, edited and submitted by hand."""

import shlex
from collections.abc import Mapping
from pathlib import Path

from lowband.errors import UserError
from lowband.spec.job import ACCOUNT, SlurmRequest
from lowband.spec.run import RunSpec

FOR_THE_JOB = ("LOWBAND_ENV_TAR", "LOWBAND_SIF")  # variables of env.sh that a clean environment would lack


def sbatch_options(job: SlurmRequest, spec: RunSpec, variables: Mapping[str, str]) -> list[str]:
    """The options of sbatch that decide where and how a run's job runs, as Snakemake's executor gives them.

    variables: the environment, of which `SlurmRequest.queue` reads
    Raises UserError if the site wants an account and there is none, or a variable is no name.
    """
    queue, asked = job.queue(variables), job.resources(spec)
    if job.account and "slurm_account" not in queue:
        raise UserError("is not set", where=ACCOUNT, allowed="the name of the project that pays for the job")
    given = {
        "account": queue.get("slurm_account"),
        "partition": queue.get("slurm_partition"),
        "qos": queue.get("qos"),
        "constraint": asked["constraint"],
        "nodes": asked["nodes"],
        "ntasks-per-node": spec.machine.node_size,
        "cpus-per-task": asked["cpus_per_task"],
        "time": asked["runtime"],
    }
    return [f"--{name}={value}" for name, value in given.items() if value] + shlex.split(job.sbatch)


def launch_line(job: SlurmRequest, spec: RunSpec, spec_file: Path) -> str:
    """The command of the job: slurm/launch.sh with the run."""
    nodes = str(job.resources(spec)["nodes"])
    words = [spec.machine.name, nodes, str(job.tasks_per_node(spec)), job.srun.strip()]
    return shlex.join(["slurm/launch.sh", *words, "python", "-m", "lowband", "train", str(spec_file)])


def batch_script(
    job: SlurmRequest, spec: RunSpec, spec_file: Path, python: Path, variables: Mapping[str, str]
) -> str:
    """The script, to be submitted from the repository's root.

    spec_file: the run's spec.json, from there; python: the interpreter whose environment the run uses
    """
    log = spec_file.with_name("%j.log")
    options = [f"--job-name={spec.run_id}", f"--output={log}", "--export=NONE"]
    options += ["--no-requeue"]  # a finished run must not begin anew unasked; `sbatch` of job.yaml may ask
    options += sbatch_options(job, spec, variables)
    kept = [f"export {name}={shlex.quote(variables[name])}" for name in FOR_THE_JOB if variables.get(name)]
    return "\n".join([
        "#!/bin/bash -l",
        "# By `lowband spec --sbatch`, to be submitted from the root of the repository: sbatch THIS_FILE.",
        "# Options on sbatch's command line replace those below.",
        *(f"#SBATCH {shlex.quote(option)}" for option in options),
        "set -euo pipefail",
        'export PYTHONPATH="$PWD/src"',
        f'export PATH={shlex.quote(str(python.parent))}:"$PATH"',
        *kept,
        f"exec {launch_line(job, spec, spec_file)}",
        "",
    ])  # fmt: skip
