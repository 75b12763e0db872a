"""Whether a node has room for what a run keeps in another memory than the devices'."""

import shutil
from contextlib import suppress

from lowband.cost.held import held_bytes
from lowband.errors import UserError
from lowband.spec.free_memory import free_memory
from lowband.spec.run import RunSpec
from lowband.spec.run_folder import RunFolder
from lowband.spec.tiers import DISK, HOST, TIERS


def check_room(spec: RunSpec, folder: RunFolder, backend: str, ranks: int) -> None:
    """Raises UserError, naming bytes, if what this node's ranks keep there has no room.

    ranks: on this node
    """
    if spec.engine != "lowband" or (not spec.scheme.tiers and spec.recompute != "host"):
        return
    held = held_bytes(spec, backend)
    free = {
        HOST: free_memory(),
        DISK: shutil.disk_usage(folder.path).free + _left_behind(folder),
    }
    for tier in TIERS:
        needed = ranks * sum(count for kind, count in held.items() if kind.endswith(f"@{tier}"))
        if needed > free[tier]:
            kept = "states and activations" if spec.recompute == "host" else "states"
            what = f"{needed:,} bytes of {kept} {_PLACES[tier]}, where {free[tier]:,} are free"
            raise UserError(what, where=f"scheme '{spec.scheme.name}'", allowed="a smaller model, more nodes")


_PLACES = {HOST: "in this node's memory", DISK: "on this node's disk"}


def _left_behind(folder: RunFolder) -> int:
    """Bytes of a killed run's states, which are removed soon, or are being removed."""
    found = 0
    for file in folder.disk.rglob("*.states"):
        with suppress(FileNotFoundError):
            found += file.stat().st_size
    return found
