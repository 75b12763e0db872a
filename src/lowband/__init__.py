"""lowband: partitioning LLM training over machines whose links get slower the further they reach.

    topology = lowband.Topology({"package": 2, "node": 8})
    model = lowband.shard(module, "hier3-exact", topology, wrap=Block)

The names below come from `lowband.engine`, which needs torch; importing lowband alone does not.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Checkpointer": "lowband.engine.checkpoint",
    "Scheme": "lowband.spec.scheme",
    "Topology": "lowband.engine.topology",
    "clip_grad_norm_": "lowband.engine.api",
    "full_state_dict": "lowband.engine.api",
    "no_sync": "lowband.engine.api",
    "shard": "lowband.engine.api",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lowband' has no attribute '{name}'")
    return getattr(import_module(_HOMES[name]), name)
