"""The memory in which a rank's shard lies, its tier: the second coordinate of a place, beside the level.

A level says how many ranks share a state, a tier where each keeps its shard: `optim: world@host`.
"""

from typing import Final, Literal

Tier = Literal["device", "host", "disk"]
DEVICE: Final = "device"
TIERS: Final = ("host",)  # those that a scheme may name, each with a lane of its own
TIERED: Final = ("optim",)  # the states that may lie there


def at(kind: str, tier: Tier) -> str:
    """The name of a kind of memory in a tier: `optim@host`; on the device, of the kind itself."""
    return kind if tier == DEVICE else f"{kind}@{tier}"
