"""lowband: partitioning LLM training over machines whose links get slower the further they reach.

    import torch, lowband  # torch.distributed is initialised (torchrun, srun)
    topology = lowband.Topology({"package": 2, "node": 8})  # sizes of the inner levels; world is implied
    model = lowband.shard(module, scheme="hier3", topology=topology, wrap=Block)
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4)  # parameters(): this rank's fp32 shards
    loss = model(x); loss.backward(); lowband.clip_grad_norm_(model, 1.0); opt.step(); opt.zero_grad()
    lowband.full_state_dict(model)  # logical fp32 tensors, on rank 0

Each name of the interface is imported when it is first used. Those that train need torch; `import lowband`,
`Scheme`, and the packages `lowband.spec`, `lowband.cost` and `lowband.predict` do not.
"""

from importlib import import_module
from typing import Any

from lowband.errors import with_hint

__version__ = "0.1.0"  # its one home: pyproject.toml reads it from here

_HOMES = {
    "Adafactor": "lowband.engine.optimizers.adafactor",
    "AdamW": "lowband.engine.optimizers.adamw",
    "Axes": "lowband.spec.axes",
    "Checkpointer": "lowband.engine.checkpoint.checkpointer",
    "Column": "lowband.spec.tensor",
    "Context": "lowband.engine.parallel.context",
    "Curves": "lowband.run.curves",
    "Enter": "lowband.spec.tensor",
    "Join": "lowband.spec.tensor",
    "Lamb": "lowband.engine.optimizers.lamb",
    "Matrices": "lowband.engine.optimizers.matrices",
    "MixtureOfExperts": "lowband.engine.parallel.experts",
    "OneByte": "lowband.engine.jobs.one_byte",
    "Pipeline": "lowband.engine.parallel.pipeline",
    "Partial": "lowband.spec.tensor",
    "Quorum": "lowband.engine.jobs.quorum",
    "Routing": "lowband.spec.routing",
    "Row": "lowband.spec.tensor",
    "Safetensors": "lowband.engine.checkpoint.safetensors_files",
    "Scheme": "lowband.spec.scheme",
    "Split": "lowband.spec.tensor",
    "Tokens": "lowband.spec.tensor",
    "Topology": "lowband.engine.transport.topology",
    "UserError": "lowband.errors",
    "Vocabulary": "lowband.spec.tensor",
    "Whole": "lowband.spec.tensor",
    "accumulate": "lowband.engine.api",
    "balance_experts": "lowband.engine.parallel.experts",
    "clip_grad_norm_": "lowband.engine.api",
    "consensus_distance": "lowband.engine.api",
    "full_state_dict": "lowband.engine.api",
    "lists_for_sends": "lowband.cost.slow_sends",
    "load_peer_checkpoint": "lowband.engine.checkpoint.peer_checkpoint",
    "no_sync": "lowband.engine.api",
    "norms": "lowband.engine.units.shard_sums",
    "one_line_errors": "lowband.run.ranks",
    "parallelize": "lowband.engine.parallel.tensor",
    "save_safetensors": "lowband.engine.checkpoint.safetensors_files",
    "shard": "lowband.engine.api",
    "spread_experts": "lowband.engine.parallel.experts",
    "sync_replicas": "lowband.engine.api",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'lowband' has no attribute '{name}'")
    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        raise with_hint(error, f"lowband.{name}") from None


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
