"""Which peer engine can run which scheme, and with which of its own arguments: one table, for runs,
export and import.

Only a placement's effective form at the given rank count matters: on 4 ranks a node of 4 is the world, and
`hsdp` is `zero3`.
"""

from dataclasses import dataclass
from typing import Any, Literal

from lowband.errors import UserError
from lowband.spec.mesh import SELF, Levels
from lowband.spec.scheme import Scheme
from lowband.spec.step import STEP
from lowband.spec.sync import Sync
from lowband.spec.tiers import DEVICE, at

Engine = Literal["lowband", "ddp", "powersgd", "fsdp2", "deepspeed"]
PEERS = ("ddp", "powersgd", "fsdp2", "deepspeed")
PEER_NAMES = {"ddp": "DDP", "powersgd": "DDP + PowerSGD", "fsdp2": "FSDP2", "deepspeed": "DeepSpeed"}

# Of our schedules, torch's classes in torch.distributed.pipelining, by which it runs stages under FSDP2; and
# those with a backward in two parts, of which torch 2.13 loses gradients (tests/dist/test_peers_axes.py).
TORCH_SCHEDULES = {
    "gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
    "breadth": "ScheduleLoopedBFS",
}  # fmt: skip
TORCH_WRONG = {"zb-v": "ScheduleZBVZeroBubble", "dualpipe-v": "ScheduleDualPipeV"}

Arguments = dict[str, Any]


@dataclass(frozen=True)
class Has:
    """A counterpart: the peer's own arguments. `<shard>`, `<groups>`, `<secondary>`, `<world>` stand for
    numbers of ranks."""

    arguments: Arguments


@dataclass(frozen=True)
class Lacks:
    """No counterpart, and why."""

    reason: str


_HOLDS_TOGETHER = Lacks("it keeps weights and gradients where it keeps the optimizer state")
_SHARDS_NOTHING = Lacks("it shards nothing")
_NO_MICS = Lacks("MiCS, its sharding inside a group, is gone since 0.19.7")
_FLAT = ["<world>"]

# form -> peer -> counterpart. A form is (weights, secondary, grads, optim), each on one rank (self), on a
# level between (inner), or on all ranks (world).
TABLE: dict[str, dict[str, Has | Lacks]] = {
    "ddp": {
        "ddp": Has({}),
        "powersgd": Has({"matrix_approximation_rank": 4}),
        "fsdp2": Lacks("it shards parameters between steps"),
        "deepspeed": Has({"stage": 0}),
    },
    "zero1": {
        "ddp": _SHARDS_NOTHING,
        "powersgd": _SHARDS_NOTHING,
        "fsdp2": Lacks("it keeps gradients where it keeps the optimizer state"),
        "deepspeed": Has({"stage": 1}),
    },
    "zero2": {
        "ddp": _SHARDS_NOTHING,
        "powersgd": _SHARDS_NOTHING,
        "fsdp2": Has({"mesh_shape": _FLAT, "reshard_after_forward": False}),
        "deepspeed": Has({"stage": 2}),
    },
    "zero3": {
        "ddp": _SHARDS_NOTHING,
        "powersgd": _SHARDS_NOTHING,
        "fsdp2": Has({"mesh_shape": _FLAT, "reshard_after_forward": True}),
        "deepspeed": Has({"stage": 3}),
    },
    "hpz": {
        "ddp": _SHARDS_NOTHING,
        "powersgd": _SHARDS_NOTHING,
        "fsdp2": Has({"mesh_shape": _FLAT, "reshard_after_forward": "<secondary>"}),
        "deepspeed": Has({"stage": 3, "zero_hpz_partition_size": "<secondary>"}),
    },
    "hsdp": {
        "ddp": _SHARDS_NOTHING,
        "powersgd": _SHARDS_NOTHING,
        "fsdp2": Has({"mesh_shape": ["<groups>", "<shard>"], "reshard_after_forward": True}),
        "deepspeed": _NO_MICS,
    },
    "other": {
        "ddp": _SHARDS_NOTHING,
        "powersgd": _SHARDS_NOTHING,
        "fsdp2": _HOLDS_TOGETHER,
        "deepspeed": _HOLDS_TOGETHER,
    },
}

# tier -> peer -> what it takes beside the placement's arguments to keep the optimizer's states there. FSDP2's
# fp32 shards are its weights: they lie there with the moments, and are copied to the device for each gather.
OFF_DEVICE: dict[str, dict[str, Has | Lacks]] = {
    "host": {
        "ddp": _SHARDS_NOTHING,
        "powersgd": _SHARDS_NOTHING,
        "fsdp2": Has({"offload_policy": "CPUOffloadPolicy"}),
        "deepspeed": Has({"offload_optimizer": {"device": "cpu"}}),
    },
    "disk": {
        "ddp": _SHARDS_NOTHING,
        "powersgd": _SHARDS_NOTHING,
        "fsdp2": Lacks("it keeps nothing on disks"),
        "deepspeed": Lacks("it reads and writes disks by an extension that has to be compiled"),
    },
}

FORMS: dict[tuple[str, str, str, str], str] = {
    ("self", "none", "self", "self"): "ddp",
    ("self", "none", "self", "world"): "zero1",
    ("self", "none", "world", "world"): "zero2",
    ("world", "none", "world", "world"): "zero3",
    ("world", "inner", "world", "world"): "hpz",
    ("inner", "none", "inner", "inner"): "hsdp",
}

# DeepSpeed's switches for the forms zero3 and hpz, and the wires that they select. It also sends weights in
# INT8 in the backward, even inside the secondary's group, where the ZeRO++ paper and our `zeropp` send them
# unquantized: it still counts as the scheme's counterpart, but its bytes inside the node differ.
QUANTIZED: dict[str, dict[str, str]] = {
    "zero_quantized_weights": {"forward_gather": "int8", "backward_gather": "int8"},
    "zero_quantized_gradients": {"grad_reduce": "int4"},
}


def form_of(scheme: Scheme, levels: Levels) -> str:
    """The row of TABLE for a scheme's placement on these levels."""

    def place(level: str | None) -> str:
        if level is None:
            return "none"
        if level == SELF or levels.size(level) == 1 < levels.world:
            return "self"
        return "world" if levels.size(level) == levels.world else "inner"

    # A secondary shard over as many ranks as the weights sends nothing less: to a peer it is none.
    is_kept = scheme.secondary is not None and levels.size(scheme.secondary) < levels.size(scheme.weights)
    secondary = scheme.secondary if is_kept else None
    key = (place(scheme.weights), place(secondary), place(scheme.grads), place(scheme.optim))
    form = FORMS.get(key, "other")
    one_group = len({levels.size(x) for x in (scheme.weights, scheme.grads, scheme.optim)}) == 1
    return form if form != "hsdp" or one_group else "other"


def peer_arguments(peer: str, scheme: Scheme, levels: Levels) -> Arguments:
    """The peer's arguments for a scheme: FSDP2's mesh, DeepSpeed's `zero_optimization`; of DDP, those of
    torch's PostLocalSGDOptimizer or nothing, and with PowerSGD those of its hook.

    Raises UserError if the peer has no counterpart.
    """
    where = f"scheme '{scheme.name}' under {PEER_NAMES[peer]}"
    if scheme.sync is not None:
        return _local_sgd(peer, scheme, scheme.sync, levels, where)
    if scheme.offload is not None:
        raise UserError("no counterpart: parts of the states beyond the device are not set up", where=where)
    if scheme.weights_tier != DEVICE:
        weights = at(scheme.weights, scheme.weights_tier)
        raise UserError(f"no counterpart: weights {weights}, beside the optimizer's", where=where)
    form = form_of(scheme, levels)
    cells = [TABLE[form][peer], *([OFF_DEVICE[scheme.optim_tier][peer]] if scheme.copies else [])]
    arguments: Arguments = {}
    for cell in cells:
        if isinstance(cell, Lacks):
            raise UserError(f"no counterpart: {cell.reason}", where=where)
        arguments |= cell.arguments
    ranks = {
        "<world>": levels.world,
        "<shard>": levels.size(scheme.optim),
        "<groups>": levels.world // levels.size(scheme.optim),
        "<secondary>": levels.size(scheme.backward_level),
    }
    filled = {key: _fill(value, ranks) for key, value in arguments.items()}
    return {**filled, **_switches(peer, scheme, levels, form, where)}


def _local_sgd(peer: str, scheme: Scheme, sync: Sync, levels: Levels, where: str) -> Arguments:
    """PostLocalSGDOptimizer's period, and the ranks of a replica."""
    if peer != "ddp":
        raise UserError("no counterpart: its replicas average gradients in every step", where=where)
    if form_of(scheme, levels) != "ddp":
        raise UserError(f"no counterpart: {_SHARDS_NOTHING.reason}", where=where)
    if sync != Sync(beyond=sync.beyond, every=sync.every):
        raise UserError("no counterpart: it averages weights, all at once, and waits for them", where=where)
    _switches(peer, scheme, levels, "ddp", where)  # refuses any wire
    return {"period": sync.every, "replica": levels.size(sync.beyond)}


def _fill(value: Any, ranks: dict[str, int]) -> Any:
    if isinstance(value, list):
        return [ranks[name] for name in value]
    return ranks.get(value, value) if isinstance(value, str) else value


def _switches(peer: str, scheme: Scheme, levels: Levels, form: str, where: str) -> Arguments:
    """DeepSpeed's switches for the wires that are not native."""
    wires = {row.name: scheme.wire(row.name) for row in STEP if scheme.wire(row.name) != "native"}
    if not wires:
        return {}
    if peer != "deepspeed":
        raise UserError("no counterpart: it has no quantized collectives", where=where)
    if form not in ("zero3", "hpz"):
        raise UserError("no counterpart: it quantizes only what is sharded over all ranks", where=where)
    if "grad_reduce" in wires and ranks_per_node(scheme, levels) == levels.world:
        what = f"no counterpart: its quantized gradients take more than one node of {levels.world} ranks"
        raise UserError(what, where=where)
    if form == "hpz" and wires.get("forward_gather") == "int8":
        wires.setdefault("backward_gather", "int8")
    switches = [name for name, means in QUANTIZED.items() if means.items() <= wires.items()]
    rest = wires.items() - {pair for name in switches for pair in QUANTIZED[name].items()}
    if rest:
        name, wire = min(rest)
        known = [", ".join(f"{wire} {name}" for name, wire in means.items()) for means in QUANTIZED.values()]
        raise UserError(f"no counterpart: {name} in {wire}", where=where, allowed=" or ".join(known))
    return dict.fromkeys(switches, True)


def ranks_per_node(scheme: Scheme, levels: Levels) -> int:
    """Ranks that DeepSpeed's two-hop gradient reduction treats as a node: the secondary's group, else the
    widest level inside the world."""
    if scheme.secondary is not None:
        return levels.size(scheme.secondary)
    return levels.sizes[-2]
