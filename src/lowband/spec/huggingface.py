"""A Hugging Face `config.json` as a model: the families whose shapes this model's formulas describe.

Llama to 4, Mistral, Mixtral, Qwen2 and 3 with and without experts, DeepSeek V2 and V3, Gemma to 3, GPT-OSS,
Command R, GPT-NeoX and GPT-2; of a file for text and pictures the text's part. Anything else, and any option
that would add parameters or products that the formulas lack, is refused. How weights are stored
(quantization_config) is refused but for families that are published so: it says nothing about training.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowband.errors import UserError
from lowband.spec.model import ModelSpec
from lowband.spec.plain_data import parse_json, read_text

Data = Mapping[str, Any]

# Our key -> the file's.
_LLAMA = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "mlp_hidden": "intermediate_size", "vocab": "vocab_size",
    "seq_len": "max_position_embeddings", "tied_head": "tie_word_embeddings", "head_dim": "head_dim",
}  # fmt: skip
_NEOX = {key: name for key, name in _LLAMA.items() if key not in ("kv_heads", "head_dim")}
_GPT2 = {
    "layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "mlp_hidden": "n_inner",
    "vocab": "vocab_size", "seq_len": "n_positions", "tied_head": "tie_word_embeddings",
}  # fmt: skip
_EXPERTS = _LLAMA | {"experts": "num_local_experts", "top_k": "num_experts_per_tok"}
_NARROW = _EXPERTS | {"expert_hidden": "moe_intermediate_size"}
_DEEPSEEK = _NEOX | {
    "experts": "n_routed_experts", "top_k": "num_experts_per_tok", "expert_hidden": "moe_intermediate_size",
    "shared_experts": "n_shared_experts", "dense_layers": "first_k_dense_replace",
}  # fmt: skip
_LATENT = {
    "kv_rank": "kv_lora_rank", "q_rank": "q_lora_rank", "rope": "qk_rope_head_dim",
    "nope": "qk_nope_head_dim", "value": "v_head_dim",
}  # fmt: skip
ALSO = {"num_local_experts": "num_experts"}  # what older files call a key
OPTIONAL = {"kv_heads": None, "mlp_hidden": None, "tied_head": False, "head_dim": None}

ROTARY = {"gated": True, "positions": "rotary", "biases": False}


def _windows(data: Data, family: "Family") -> dict[str, Any]:
    """Layers that see a window, and which of them see all: as the file says, or the family has it."""
    window, kinds = data.get("sliding_window"), data.get("layer_types")
    every = data.get("sliding_window_pattern", family.default.get("full_every"))
    if window is None:
        return {}
    if kinds is not None:
        full = [i for i, kind in enumerate(kinds, start=1) if kind == "full_attention"]
        if len(full) == len(kinds):
            return {}
        every = full[0] if full else None
        if full and full != list(range(full[0], len(kinds) + 1, full[0])):
            raise ValueError("an order of layer_types other than every so many-th full")
    return {"window": window, "full_every": every}


def _width(data: Data, family: "Family") -> dict[str, Any]:
    """A head's, if it is no plain share of hidden."""
    names = [family.keys.get(key, "") for key in ("head_dim", "heads", "hidden")]
    width, heads, hidden = (data.get(name) for name in names)
    heads = family.default.get("heads") if heads is None else heads
    is_plain = isinstance(heads, int) and isinstance(width, int) and width * heads == hidden
    return {"head_dim": None} if is_plain else {}


def _biases(data: Data, family: "Family") -> dict[str, Any]:
    """Of families that may have some in attention. Raises ValueError where they are always there."""
    told = data.get("attention_bias")
    if family.fixed.get("biases") in (True, "matrices") and told is False:
        raise ValueError("attention_bias False")
    return {"biases": "attention"} if told and family.fixed.get("biases") is False else {}


def _latent(data: Data, family: "Family") -> dict[str, Any]:
    if data.get("attention_bias"):
        raise ValueError("attention_bias True")
    if data.get("moe_layer_freq", 1) != 1:
        raise ValueError(f"moe_layer_freq {data['moe_layer_freq']}")
    return {"latent": {ours: data.get(name) for ours, name in _LATENT.items()}}


def _all_routed(data: Data, family: "Family") -> dict[str, Any]:
    if data.get("decoder_sparse_step", 1) != 1 or data.get("mlp_only_layers"):
        raise ValueError("layers without experts")
    return {}


def _shared(data: Data, family: "Family") -> dict[str, Any]:
    wide, one = data.get("shared_expert_intermediate_size"), data.get("moe_intermediate_size")
    if not isinstance(wide, int) or not isinstance(one, int) or one < 1 or wide % one:
        raise ValueError(f"a shared expert of {wide} beside experts of {one}")
    return {"shared_experts": wide // one}


def _llama4(data: Data, family: "Family") -> dict[str, Any]:
    """The file's intermediate_size is an expert's; layers without experts have one of their own."""
    layers, step = data.get("num_hidden_layers", 0), data.get("interleave_moe_layer_step", 1)
    routed = data.get("moe_layers") or range(step - 1, layers, step)
    return {"dense_layers": layers - len(routed), "window": data.get("attention_chunk_size")}


@dataclass(frozen=True)
class Family:
    """keys: ours -> the file's; fixed: what the family has; default: of keys that the file may leave out

    more:   further keys from the file. Raise ValueError for what the formulas lack
    harmless: options of REFUSED that change nothing here
    """

    keys: Mapping[str, str]
    fixed: Mapping[str, Any]
    default: Mapping[str, Any] = field(default_factory=dict)
    more: "tuple[Callable[[Data, Family], dict[str, Any]], ...]" = ()
    harmless: tuple[str, ...] = ()


_GEMMA3 = {  # of Gemma3TextConfig: published files leave them out
    "heads": 8, "kv_heads": 4, "head_dim": 256, "vocab": 262208, "seq_len": 131072, "tied_head": True,
    "full_every": 6,
}  # fmt: skip
STORED = ("quantization_config",)
FAMILIES = {
    "llama": Family(_LLAMA, ROTARY),
    "mistral": Family(_LLAMA, ROTARY, more=(_windows,)),
    "qwen2": Family(_LLAMA, ROTARY | {"biases": "qkv"}),
    "qwen3": Family(_LLAMA, ROTARY | {"qk_norm": True}),
    "gemma": Family(_LLAMA, ROTARY, {"tied_head": True}),
    "gemma2": Family(
        _LLAMA, ROTARY | {"post_norms": True}, {"tied_head": True, "full_every": 2}, (_windows,)
    ),
    "gemma3_text": Family(_LLAMA, ROTARY | {"post_norms": True, "qk_norm": True}, _GEMMA3, (_windows,)),
    "cohere": Family(_LLAMA, ROTARY | {"parallel_block": True}, {"tied_head": True}),
    "mixtral": Family(_EXPERTS, ROTARY, more=(_windows,)),
    "gpt_oss": Family(
        _EXPERTS, ROTARY | {"biases": "matrices", "sinks": True}, {"full_every": 2}, (_windows,), STORED
    ),
    "llama4_text": Family(
        _EXPERTS | {"mlp_hidden": "intermediate_size_mlp", "expert_hidden": "intermediate_size"},
        ROTARY | {"shared_experts": 1, "chunked": True, "full_every": 4}, {"top_k": 1}, (_llama4,),
        ("use_qk_norm",),  # which has no weights there
    ),
    "qwen2_moe": Family(
        _NARROW, ROTARY | {"biases": "qkv", "shared_gate": True}, more=(_all_routed, _shared)
    ),
    "qwen3_moe": Family(_NARROW, ROTARY | {"qk_norm": True}, more=(_all_routed,)),
    "deepseek_v2": Family(_DEEPSEEK, ROTARY, more=(_latent,)),
    "deepseek_v3": Family(_DEEPSEEK, ROTARY, more=(_latent,), harmless=STORED),
    "gpt_neox": Family(_NEOX, {"positions": "rotary", "biases": True}),
    "gpt2": Family(_GPT2, {"positions": "learned", "biases": True}, {"tied_head": True}),
}  # fmt: skip

# Options that add parameters or change products: allowed if they are missing, null or false.
REFUSED = (
    "mlp_bias", "add_cross_attention", "use_bidirectional_attention", "use_qk_norm", "use_sliding_window",
    "quantization_config", "num_experts", "num_local_experts",
)  # fmt: skip


def model_of_config(path: Path) -> ModelSpec:
    """The model of a config.json, named after its folder. Raises UserError for what the formulas lack."""
    data = parse_json(read_text(path), path)
    if isinstance(data, dict) and isinstance(data.get("text_config"), dict):
        data = data["text_config"]
    name = data.get("model_type") if isinstance(data, dict) else None
    if not isinstance(name, str) or name not in FAMILIES:
        raise UserError(f"model_type {name!r} cannot be predicted", where=path, allowed=FAMILIES)
    family = FAMILIES[name]
    known = {*family.keys.values(), *(ALSO.get(key) for key in family.keys.values()), *family.harmless}
    for key in REFUSED:
        if data.get(key) and key not in known:
            raise UserError(f"{key} {data[key]} cannot be predicted for {name}", where=path)
    for key in ("sliding_window", "head_dim", "attention_chunk_size"):
        _count(data, key, path)
    found = {ours: _value(data, ours, family) for ours in family.keys}
    missing = [family.keys[ours] for ours, value in found.items() if value is None and ours not in OPTIONAL]
    if missing:
        raise UserError(f"key '{missing[0]}' is missing", where=path)
    try:
        for more in (_width, _biases, *family.more):
            found |= more(data, family)
    except (ValueError, TypeError) as error:
        raise UserError(f"{error} cannot be predicted for {name}", where=path) from None
    stem = path.resolve().parent.name if path.name == "config.json" else path.stem
    return ModelSpec.parse({"name": stem, "source": str(path), **family.fixed, **found}, path)


def _value(data: Data, ours: str, family: Family) -> Any:
    """Of one of our keys: the file's, or the family's, or the common default."""
    theirs = family.keys[ours]
    for key in (theirs, ALSO.get(theirs, theirs)):
        if data.get(key) is not None:
            return data[key]
    return family.default.get(ours, OPTIONAL.get(ours))


def _count(data: Data, key: str, path: Path) -> None:
    """Raises UserError unless the value of an optional key is 1 or more."""
    value = data.get(key)
    harmless = value == 0 and not data.get("use_sliding_window", True)
    if value is not None and not harmless and (type(value) is not int or value < 1):
        raise UserError(f"{key} is {value!r}", where=path, allowed="1 or more")
