"""Whether this process is a task of Slurm's. Needs only the standard library."""

import os


def is_slurm_task() -> bool:
    """Whether srun started this process as a task of a run, not as the shell of an interactive job."""
    is_shell = os.environ.get("SLURM_NTASKS") == "1" and "MASTER_ADDR" not in os.environ
    return "SLURM_PROCID" in os.environ and "SLURM_STEP_ID" in os.environ and not is_shell
