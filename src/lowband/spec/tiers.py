"""The memory in which a rank's shard lies, its tier: the second coordinate of a place, beside the level.

A level says how many ranks share a state, a tier where each keeps its shard: `optim: world@host`.
"""

from functools import cache
from typing import Final, Literal

Tier = Literal["device", "host", "disk"]
DEVICE: Final = "device"
HOST: Final = "host"
DISK: Final = "disk"
Named = Literal["host", "disk"]
TIERS: Final[tuple[Named, ...]] = (HOST, DISK)  # those that a scheme may name, each with a lane of its own


def apart(key: str, place: str) -> tuple[str, Tier]:
    """Level and tier of `world@host`. Raises ValueError for another tier. key: whose place it is"""
    level, mark, name = place.partition("@")
    for tier in TIERS:
        if name == tier:
            return level, tier
    if mark:
        raise ValueError(f"{key}: no tier '{name}' (allowed: {', '.join(TIERS)})")
    return level, DEVICE


@cache
def at(name: str, tier: Tier) -> str:
    """A level, or a kind of memory, with its tier behind: `world@host`; on the device the name itself."""
    return name if tier == DEVICE else f"{name}@{tier}"
