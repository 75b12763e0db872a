"""Whether a node has room for the states that a run keeps in another memory than the devices'."""

import shutil

import psutil

from lowband.cost.held import held_bytes
from lowband.errors import UserError
from lowband.spec.run import RunSpec
from lowband.spec.run_folder import RunFolder
from lowband.spec.tiers import DISK, HOST, TIERS


def check_room(spec: RunSpec, folder: RunFolder, backend: str, ranks: int) -> None:
    """Raises UserError, naming bytes, if the ranks that this process is or starts do not fit on its node."""
    if spec.engine != "lowband" or spec.scheme.optim_tier not in TIERS:
        return
    held = held_bytes(spec, backend)
    left = sum(file.stat().st_size for file in folder.disk.rglob("*.states"))  # a killed run's, removed soon
    free = {
        HOST: psutil.virtual_memory().available,
        DISK: shutil.disk_usage(folder.path).free + left,
    }
    for tier in TIERS:
        needed = ranks * sum(count for kind, count in held.items() if kind.endswith(f"@{tier}"))
        if needed > free[tier]:
            what = f"{needed} bytes of states of {ranks} ranks in this node's {tier}, {free[tier]} are free"
            raise UserError(what, where=f"scheme '{spec.scheme.name}'", allowed="a smaller model, more nodes")
