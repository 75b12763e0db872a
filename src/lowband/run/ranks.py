"""Who am I among the ranks: from torchrun, from srun, or from the local launcher."""

import os
from dataclasses import dataclass

from lowband.errors import UserError


@dataclass(frozen=True)
class Rank:
    """One rank of a job. `init_method` is torch.distributed's."""

    rank: int
    world: int
    local_rank: int
    init_method: str


# Variable names of rank, world size and local rank, by launcher.
_LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}


def from_environment(ranks: int) -> Rank | None:
    """This process's rank, or None if no launcher has started it.

    ranks: the number that the run asks for
    Raises UserError if the launcher started another number, or gave no MASTER_ADDR and MASTER_PORT.
    """
    for launcher, names in _LAUNCHERS.items():
        if names[0] in os.environ and (launcher != "srun" or "SLURM_STEP_ID" in os.environ):
            rank, world, local_rank = (int(os.environ[name]) for name in names)
            break
    else:
        return None
    if world != ranks:
        raise UserError(
            f"{launcher} started {world} ranks", where=names[1], allowed=f"{ranks}, as the spec says"
        )
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in os.environ:
            raise UserError(f"{name} is not set", where=launcher, allowed="address and port of rank 0")
    return Rank(rank, world, local_rank, "env://")
