"""A plan's candidate as the options of the software that runs it: Megatron-LM's arguments, DeepSpeed's
configuration, torchtitan's job configuration. What the candidate does not decide, such as data, is left out.

Names are those of Megatron-LM's `megatron/training/arguments.py` (core 0.12), DeepSpeed's "Configuration
JSON" and torchtitan's `config_manager.py` (of 2025).
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lowband.errors import UserError
from lowband.predict.search.candidates import Candidate
from lowband.predict.search.software import attention, every_of_rank, is_all, layers_of_stage, runners
from lowband.predict.workload import Workload
from lowband.spec.exchange import TIERS
from lowband.spec.files import create_whole
from lowband.spec.machine import TierName
from lowband.spec.mesh import SELF, WORLD
from lowband.spec.model import ModelSpec
from lowband.spec.tiers import DISK

_DEVICES = {tier: device for device, tier in TIERS.items()}
_ROTATES = {"ring": "alltoall", "gather": "allgather"}
_CP_TYPES = {"ring": "p2p", "gather": "allgather", "heads": "a2a"}
_SCHEDULES = {
    "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb-v": "ZBVZeroBubble", "dualpipe-v": "DualPipeV",
}  # fmt: skip

_DEFAULTS = ModelSpec.model_fields
_NOT_MEGATRONS = (
    "attention", "window", "chunked", "latent", "sinks", "parallel_block", "post_norms", "dense_layers",
    "shared_gate",
)  # fmt: skip


def write(best: Candidate, path: Path, software: Sequence[str]) -> Path:
    """Write the options of the first of some software that runs the candidate; returns their file.

    path: without its ending, which the software decides
    Raises UserError if none of them runs it or has such options, or if there is such a file.
    """
    names = [name for name in software if name in _WRITERS and name in runners(best.job)]
    if not names:
        raise UserError("no options of its to write", where="--software", allowed=sorted(_WRITERS))
    ending, text = _WRITERS[names[0]]
    whole = path.with_name(path.name + ending)
    if whole.exists():
        raise UserError(f"'{whole}' is taken", where="--write")
    create_whole(whole, text(best))
    return whole


def megatron(best: Candidate) -> str:
    """One argument a line."""
    arguments = {**_shape(best.job), **_degrees(best)}
    lines = [f"--{key}" + ("" if value is True else f" {value}") for key, value in arguments.items() if value]
    return "\n".join(lines) + "\n"


def _shape(job: Workload) -> dict[str, Any]:
    model = job.model
    shape: dict[str, Any] = {
        "num-layers": model.layers, "hidden-size": model.hidden, "num-attention-heads": model.heads,
        "ffn-hidden-size": model.mlp_width, "seq-length": job.seq_len,
        "max-position-embeddings": model.seq_len, "vocab-size": model.vocab,
        "position-embedding-type": "rope" if model.positions == "rotary" else "learned_absolute",
        "swiglu": model.gated, "disable-bias-linear": model.biases is not True,
        "add-qkv-bias": model.biases == "qkv",
        "normalization": "LayerNorm" if model.biases is True else "RMSNorm",
        "untie-embeddings-and-output-weights": not model.tied_head,
    }  # fmt: skip
    unknown = [name for name in _NOT_MEGATRONS if getattr(model, name) != _DEFAULTS[name].default]
    if unknown := unknown + ["biases"] * (model.biases in ("attention", "matrices")):
        what = f"{', '.join(unknown)}: Megatron-LM's options for these are not known here"
        raise UserError(what, where=f"model '{model.name}'")
    if model.head_dim is not None:
        shape["kv-channels"] = model.head_dim
    if model.qk_norm:
        shape["qk-layernorm"] = True
    if model.kv_heads is not None:
        shape |= {"group-query-attention": True, "num-query-groups": model.kv_heads}
    if model.experts is not None:
        shape |= {
            "num-experts": model.experts, "moe-router-topk": model.top_k,
            "moe-ffn-hidden-size": model.expert_width,
            "moe-shared-expert-intermediate-size": model.shared_experts * model.expert_width,
            "moe-token-dispatcher-type": "alltoall", "moe-grouped-gemm": True,
        }  # fmt: skip
    return shape


def _degrees(best: Candidate) -> dict[str, Any]:
    job, axes, scheme = best.job, best.job.axes, best.job.scheme
    first, last = (axes.layers[0], axes.layers[-1]) if axes.layers else (1, 1)
    most = max(axes.layers, default=1)
    optimizers = job.levels.world // job.levels.size(scheme.optim)
    recompute: dict[str, Any] = {} if job.recompute == "none" else {"recompute-granularity": job.recompute}
    if job.recompute == "full":
        some = {"recompute-method": "block", "recompute-num-layers": layers_of_stage(job)}
        every = {"recompute-method": "uniform", "recompute-num-layers": 1}
        recompute |= every if job.recomputed == 1 else some
    on_host: dict[str, Any] = {}
    if job.placed is not None:
        on_host = {"use-precision-aware-optimizer": True, "optimizer-cpu-offload": True}
        on_host |= {"optimizer-offload-fraction": job.placed.share, "overlap-cpu-optimizer-d2h-h2d": True}
    stack, is_sharded = job.stack, scheme.optim != SELF
    hides = stack.overlap is None or stack.overlap.value > 0
    hides_tensor = stack.tensor_overlap is not None and stack.tensor_overlap.value > 0
    fp8 = {"fp8-format": "hybrid"} if stack.products != "bf16" else {}
    # What the stack's constants stand on, and what is off by default.
    hidden: dict[str, Any] = {
        "overlap-grad-reduce": hides,
        "overlap-param-gather": hides and is_sharded,
        "tp-comm-overlap": axes.tensor > 1 and axes.sequence_parallel and hides_tensor,
        "grad-reduce-in-bf16": stack.reduce_dtype == "bf16",
    }
    return {
        "tensor-model-parallel-size": axes.tensor, "sequence-parallel": axes.sequence_parallel,
        "context-parallel-size": axes.context,
        "cp-comm-type": "+".join(_CP_TYPES[way] for way in attention(job)) if axes.context > 1 else "",
        "expert-model-parallel-size": axes.expert,
        "expert-tensor-parallel-size": 1 if job.model.experts is not None else 0,  # experts are whole
        "pipeline-model-parallel-size": axes.pipeline,
        "num-virtual-stages-per-pipeline-rank": axes.chunks if axes.chunks > 1 else 0,
        "account-for-embedding-in-pipeline-split": bool(axes.layers) and first < most,
        "account-for-loss-in-pipeline-split": bool(axes.layers) and last < most,
        "micro-batch-size": best.micro_batch,
        "global-batch-size": best.micro_batch * best.accumulation * job.levels.world // axes.context,
        "use-distributed-optimizer": is_sharded,
        "num-distributed-optimizer-instances": optimizers if scheme.optim not in (SELF, WORLD) else 0,
        **recompute,
        **on_host,
        **hidden,
        "bf16": True, **fp8, "fp8-recipe": "mxfp8" if stack.products == "mxfp8" else "",
    }  # fmt: skip


def deepspeed(best: Candidate) -> str:
    """Its JSON; degrees of tensor and pipeline are options of the script that builds the model."""
    job, scheme = best.job, best.job.scheme
    stage = 3 if scheme.weights != SELF else 2 if scheme.grads != SELF else 1 if scheme.optim != SELF else 0
    zero: dict[str, Any] = {"stage": stage}
    if scheme.secondary is not None:
        zero["zero_hpz_partition_size"] = job.levels.size(scheme.secondary)
    if stage == 3 and not is_all(scheme.weights, job):
        zero["mics_shard_size"] = job.levels.size(scheme.weights)
    if scheme.wire("forward_gather") != "native":
        zero["zero_quantized_weights"] = True
    if scheme.wire("grad_reduce") != "native":
        zero["zero_quantized_gradients"] = True
    if job.placed is not None:
        part = {"ratio": job.placed.share} if job.placed.share < 1 else {}
        zero |= _beyond("offload_optimizer", job.placed.optim, part)
        zero |= _beyond("offload_param", job.placed.weights, {})
    written = {
        "train_batch_size": best.micro_batch * best.accumulation * job.levels.world // job.axes.context,
        "train_micro_batch_size_per_gpu": best.micro_batch,
        "gradient_accumulation_steps": best.accumulation,
        "bf16": {"enabled": True},
        "communication_data_type": {"bf16": "bfp16"}.get(job.stack.reduce_dtype, job.stack.reduce_dtype),
        "zero_optimization": zero,
    }
    return json.dumps(written, indent=2) + "\n"


def _beyond(key: str, tier: TierName | None, more: dict[str, Any]) -> dict[str, Any]:
    """DeepSpeed's object for states in a tier; a disk's path is the user's own."""
    path = {"nvme_path": "/local_nvme"} if tier == DISK else {}
    return {key: {"device": _DEVICES[tier], "pin_memory": True, **path, **more}} if tier else {}


def torchtitan(best: Candidate) -> str:
    """Its TOML, without the model's flavor."""
    job, axes, scheme = best.job, best.job.axes, best.job.scheme
    shard = job.levels.size(scheme.optim) // axes.context  # its shards lie along context, too
    own = best.micro_batch * (best.accumulation if job.is_in_stages else 1)
    least = max(axes.layers, default=0)
    parallelism = {
        "data_parallel_shard_degree": shard,
        "data_parallel_replicate_degree": job.levels.world // axes.context // shard,
        "fsdp_reshard_after_forward": "never" if scheme.weights == SELF else "always",
        "tensor_parallel_degree": axes.tensor, "context_parallel_degree": axes.context,
        "expert_parallel_degree": axes.expert, "pipeline_parallel_degree": axes.pipeline,
    }  # fmt: skip
    if axes.context > 1:
        parallelism["context_parallel_rotate_method"] = _ROTATES[attention(job)[0]]
    if job.is_in_stages:
        parallelism |= {
            "pipeline_parallel_schedule": _SCHEDULES[axes.row],
            "pipeline_parallel_microbatch_size": best.micro_batch,
            "pipeline_parallel_layers_per_stage": max(axes.blocks(job.model)),
            "pipeline_parallel_first_stage_less_layers": least - axes.layers[0] if axes.layers else 0,
            "pipeline_parallel_last_stage_less_layers": least - axes.layers[-1] if axes.layers else 0,
        }
    kept = {"none": {"mode": "none"}, "full": {"mode": "full"}}
    if job.recomputed < 1:
        kept["full"] = {"mode": "selective", "selective_ac_option": str(every_of_rank(job))}
    tables: dict[str, dict[str, Any]] = {
        "training": {
            "local_batch_size": own, "seq_len": job.seq_len,
            "global_batch_size": best.micro_batch * best.accumulation * job.levels.world // axes.context,
            **({} if job.placed is None else {"enable_cpu_offload": True}),
        },
        "parallelism": parallelism,
        "activation_checkpoint": kept.get(job.recompute, {"mode": "selective", "selective_ac_option": "op"}),
    }  # fmt: skip
    compiled = {"model": job.stack.operations == "fused", "loss": job.stack.logit_bytes is not None}
    if any(compiled.values()):
        tables["compile"] = {
            "enable": True,
            "components": [part for part, is_so in compiled.items() if is_so],
        }
    if job.stack.products != "bf16":
        tables["model"] = {"converters": [{"fp8": "float8", "mxfp8": "mx"}[job.stack.products]]}
    return "\n".join(_table(name, values) for name, values in tables.items())


def _table(name: str, values: dict[str, Any]) -> str:
    return "\n".join([f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""])


_WRITERS: dict[str, tuple[str, Callable[[Candidate], str]]] = {
    "megatron-lm": (".args", megatron),
    "deepspeed": (".json", deepspeed),
    "torchtitan": (".toml", torchtitan),
}
