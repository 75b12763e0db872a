"""A scheme as a peer's configuration, and a user's DeepSpeed configuration as a scheme."""

import json
from pathlib import Path
from typing import Any

import yaml

from lowband.errors import UserError
from lowband.spec.config import Config
from lowband.spec.mesh import SELF, WORLD, Levels
from lowband.spec.peers import QUANTIZED, peer_arguments
from lowband.spec.plain_data import parse_json, read_text
from lowband.spec.scheme import Scheme
from lowband.spec.tiers import Tier, at


def export_scheme(config: Config, name: str, cluster: str, ranks: int, peer: str) -> str:
    """JSON: DeepSpeed's `zero_optimization`, or FSDP2's mesh shape and `reshard_after_forward`.

    Raises UserError, with the reason, where the peer has no counterpart.
    """
    scheme = config.scheme(name)
    levels = Levels.fit(config.machine(cluster).sizes, ranks)
    scheme.check(levels)
    arguments = peer_arguments(peer, scheme, levels)
    return json.dumps({"zero_optimization": arguments} if peer == "deepspeed" else arguments, indent=2)


def import_scheme(config: Config, path: Path, cluster: str, ranks: int) -> str:
    """A user's DeepSpeed JSON as an entry for config/schemes.yaml, named after the file."""
    values = read_deepspeed(path)
    levels = Levels.fit(config.machine(cluster).sizes, ranks)
    scheme = scheme_of_deepspeed(values, levels, str(path))
    entry = scheme.model_dump(exclude_defaults=True, exclude={"name"})
    return yaml.safe_dump({path.stem: entry}, sort_keys=False).rstrip()


def read_deepspeed(path: Path) -> dict[str, Any]:
    """A DeepSpeed configuration from its file. Raises UserError if it is not a JSON object."""
    values = parse_json(read_text(path), path)
    if not isinstance(values, dict):
        raise UserError("is not a mapping of keys to values", where=path)
    return values


def scheme_of_deepspeed(config: dict[str, Any], levels: Levels, where: str) -> Scheme:
    """The scheme that a user's DeepSpeed configuration asks for.

    Tuning keys, which do not place states, are ignored. Raises UserError for keys without a counterpart.
    """
    zero = config.get("zero_optimization", {})
    if not isinstance(zero, dict):
        raise UserError("zero_optimization is not a mapping of keys to values", where=where)
    refused = sorted(key for key in zero if key in _NO_SCHEME and zero[key] not in (None, False, 0))
    if refused:
        raise UserError(f"zero_optimization.{refused[0]} has no counterpart here", where=where)
    unknown = sorted(set(zero) - _PLACING - _TUNING - _NO_SCHEME)
    if unknown:
        raise UserError(
            f"zero_optimization.{unknown[0]} is not known", where=where, allowed=sorted(_PLACING | _TUNING)
        )
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3) or isinstance(stage, bool):
        raise UserError(f"zero_optimization.stage is {stage!r}", where=where, allowed="0, 1, 2, 3")
    shard = _group_level(zero, "mics_shard_size", levels, where) or WORLD
    secondary = _group_level(zero, "zero_hpz_partition_size", levels, where)
    wires = {key: wire for name, means in QUANTIZED.items() if zero.get(name) for key, wire in means.items()}
    if stage != 3 and (wires or secondary or shard != WORLD):
        raise UserError(f"hpZ, MiCS and quantized collectives need stage 3, not {stage}", where=where)
    places = {
        "weights": shard if stage == 3 else SELF,
        "grads": shard if stage >= 2 else SELF,
        "optim": shard if stage >= 1 else SELF,
    }
    places["optim"] = at(places["optim"], _tier(zero, "offload_optimizer", where))
    places["weights"] = at(places["weights"], _tier(zero, "offload_param", where))
    scheme = Scheme.parse({"name": "imported", **places, "secondary": secondary, **wires}, where)
    scheme.check(levels)
    return scheme


def _tier(zero: dict[str, Any], offload: str, where: str) -> Tier:
    """Where states lie of which an object of DeepSpeed's says so. Its keys but `device` and `ratio` affect
    only speed.
    """
    key, (known, stages) = f"zero_optimization.{offload}", _OFFLOADING[offload]
    values = {} if (given := zero.get(offload)) is None else given
    if not isinstance(values, dict):
        raise UserError(f"{key} is not a mapping of keys to values", where=where)
    if unknown := sorted(set(values) - known):
        raise UserError(f"{key}.{unknown[0]} is not known", where=where, allowed=sorted(known))
    device, ratio = str(values.get("device", "none")), values.get("ratio", 1)
    if device not in TIERS:
        raise UserError(f"{key}.device is {device!r}", where=where, allowed=[*TIERS])
    if ratio != 1:
        raise UserError(f"{key}.ratio is {ratio!r}", where=where, allowed="1: all states in one place")
    stage = zero.get("stage", 0)
    if device != "none" and stage not in stages:
        allowed = f"stage {', '.join(map(str, stages))}"
        raise UserError(f"{key} is not for stage {stage}", where=where, allowed=allowed)
    return TIERS[device]


def _group_level(zero: dict[str, Any], key: str, levels: Levels, where: str) -> str | None:
    """The level whose groups have as many ranks as the value of `key`; None for one rank or no such key."""
    size = zero.get(key)
    if size in (None, -1, 0, 1):
        return None
    for name, ranks in zip(levels.names, levels.sizes, strict=True):
        if ranks == size:
            return name
    raise UserError(f"zero_optimization.{key}: no level of {size!r} ranks", where=where, allowed=levels.sizes)


TIERS: dict[str, Tier] = {"none": "device", "cpu": "host", "nvme": "disk"}  # by DeepSpeed's name
# The keys of an object that says where states lie, and the stages that it is for.
_OFFLOADING: dict[str, tuple[set[str], tuple[int, ...]]] = {
    "offload_optimizer": (
        {"device", "ratio", "buffer_count", "cpuadam_cores_perc", "fast_init", "nvme_path", "pin_memory",
         "pipeline", "pipeline_read", "pipeline_write", "super_offload"},
        (1, 2, 3),
    ),
    "offload_param": (
        {"device", "buffer_count", "buffer_size", "max_in_cpu", "nvme_path", "pin_memory"}, (3,),
    ),
}  # fmt: skip
_PLACING = {"stage", "zero_hpz_partition_size", "mics_shard_size", *_OFFLOADING, *QUANTIZED}
_NO_SCHEME = {
    "cpu_offload", "cpu_offload_param", "zenflow", "zeropp_loco_param",
    "zero_quantized_nontrainable_weights", "mics_hierarchical_params_gather",
}  # fmt: skip
_TUNING = {
    "allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "elastic_checkpoint",
    "ignore_unused_parameters", "load_from_fp32_weights", "memory_efficient_linear", "overlap_comm",
    "reduce_bucket_size", "reduce_scatter", "round_robin_gradients",
    "stage3_gather_16bit_weights_on_model_save",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_module_granularity_threshold",
    "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size", "sub_group_size",
    "use_multi_rank_bucket_allreduce",
}  # fmt: skip
