"""Whether jobs can be submitted from here: to this machine's Slurm at all, and those of certain runs."""

import getpass
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from lowband.box import network
from lowband.errors import UserError
from lowband.spec.job import ACCOUNT, SlurmRequest
from lowband.spec.machine import Machine
from lowband.spec.run import RunSpec

PING_S = 20  # a controller that takes longer would keep every submission waiting


def why_not() -> str:
    """Why jobs cannot be submitted from here, in a few words; "" if they can."""
    for program in ("sbatch", "scontrol"):
        if shutil.which(program) is None:
            return f"no program {program}"
    try:
        ping = subprocess.run(
            ["scontrol", "ping"], capture_output=True, text=True, timeout=PING_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no controller answers scontrol ping within {PING_S} s"
    if ping.returncode or " UP" not in ping.stdout:
        lines = (ping.stderr + ping.stdout).strip().splitlines()
        return f"no controller answers scontrol ping: {lines[-1] if lines else 'it printed nothing'}"
    return ""


def accounts() -> set[str]:
    """The accounts that Slurm's accounting has for this user, in small letters, as Slurm keeps them.

    Also empty where it cannot be asked, or does not answer.
    """
    query = ["sacctmgr", "--noheader", "--parsable2", "show", "assoc", f"user={getpass.getuser()}"]
    try:
        done = subprocess.run(
            [*query, "format=account"], capture_output=True, text=True, timeout=PING_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return set()
    return set(done.stdout.lower().split()) if done.returncode == 0 else set()


def check(
    specs: Sequence[RunSpec], jobs: Mapping[str, SlurmRequest], variables: Mapping[str, str], root: Path
) -> None:
    """Raises UserError if jobs of these runs would fail for a reason that is known before they are submitted.

    jobs: by cluster, what its jobs request; variables: the environment; root: holds slurm/
    """
    boxes = sorted({spec.machine.name for spec in specs if spec.machine.box is not None})
    if boxes and not network.MACHINE.exists():
        sites = [f"--profile slurm/{path.parent.name}" for path in sorted(root.glob("slurm/*/config.yaml"))]
        raise UserError(
            f"these runs are for a box ({', '.join(boxes)}), and this is none", where="--profile",
            allowed=f"lowband box run --cluster {boxes[0]} -- snakemake ...; on a site {', '.join(sites)}",
        )  # fmt: skip
    needing = [cluster for cluster, job in jobs.items() if job.account]
    if network.MACHINE.exists():
        needing = []
        box = Machine.read_json(network.MACHINE)
        for spec in specs:
            network.check_links(spec, box)
    given = variables.get(ACCOUNT, "")
    if needing and not given:
        raise UserError(
            f"{ACCOUNT} is not set, and the site wants to know which project pays",
            where=f"slurm/{needing[0]}",
            allowed="a project's name; account: false in job.yaml, where jobs need none",
        )
    reason = why_not()
    if reason:
        raise UserError(
            f"no Slurm here: {reason}",
            allowed="a login node of a site; lowband box run -- snakemake --profile slurm",
        )
    known = accounts() if needing else set()
    if known and given.lower() not in known:
        raise UserError(f"Slurm has no account '{given}' for you", where=ACCOUNT, allowed=sorted(known))
