"""Check whether this machine can submit Slurm jobs: the programs exist and a controller answers."""

import shutil
import subprocess

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
