"""A Hugging Face `config.json` as a model: the families whose shapes this model's formulas describe.

Llama, Mistral, Qwen2, GPT-NeoX and GPT-2. Anything else, and any option that would add parameters or products
that the formulas lack, is refused.
"""

from pathlib import Path
from typing import Any

from lowband.errors import UserError
from lowband.spec.model import ModelSpec
from lowband.spec.plain_data import parse_json, read_text

# Our key -> the file's, per family. Without a default here, the file must state it.
_LLAMA = {
    "layers": "num_hidden_layers", "hidden": "hidden_size", "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads", "mlp_hidden": "intermediate_size", "vocab": "vocab_size",
    "seq_len": "max_position_embeddings", "tied_head": "tie_word_embeddings",
}  # fmt: skip
_NEOX = {key: name for key, name in _LLAMA.items() if key != "kv_heads"}
_GPT2 = {
    "layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "mlp_hidden": "n_inner",
    "vocab": "vocab_size", "seq_len": "n_positions", "tied_head": "tie_word_embeddings",
}  # fmt: skip
KEYS = {"llama": _LLAMA, "mistral": _LLAMA, "qwen2": _LLAMA, "gpt_neox": _NEOX, "gpt2": _GPT2}
OPTIONAL = {"kv_heads": None, "mlp_hidden": None, "tied_head": False}

ROTARY = {"gated": True, "positions": "rotary"}
FIXED: dict[str, dict[str, Any]] = {
    "llama": {**ROTARY, "biases": False},
    "mistral": {**ROTARY, "biases": False},
    "qwen2": {**ROTARY, "biases": "qkv"},
    "gpt_neox": {"positions": "rotary", "biases": True},
    "gpt2": {"positions": "learned", "biases": True},
}

# Options that add parameters or change products: allowed if they are missing, null or false.
REFUSED = (
    "attention_bias", "mlp_bias", "quantization_config", "add_cross_attention", "num_experts",
    "num_local_experts",
)  # fmt: skip


def model_of_config(path: Path) -> ModelSpec:
    """The model of a config.json, named after its folder. Raises UserError for what the formulas lack."""
    data = parse_json(read_text(path), path)
    family = data.get("model_type") if isinstance(data, dict) else None
    if not isinstance(family, str) or family not in KEYS:
        raise UserError(f"model_type {family!r} cannot be predicted", where=path, allowed=KEYS)
    options = {key: data[key] for key in REFUSED if key in data}
    if family == "gpt_neox":  # has biases everywhere, unless it says otherwise
        options["attention_bias"] = not data.get("attention_bias", True)
    for key, value in options.items():
        if value:
            raise UserError(f"{key} {data[key]} cannot be predicted for {family}", where=path)
    found = {ours: data.get(name, _default(ours, family)) for ours, name in KEYS[family].items()}
    missing = [KEYS[family][ours] for ours, value in found.items() if value is None and ours not in OPTIONAL]
    if missing:
        raise UserError(f"key '{missing[0]}' is missing", where=path)
    window = (
        _count(data, "sliding_window", path) if data.get("use_sliding_window", family == "mistral") else None
    )
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    model = ModelSpec.parse({"name": name, "source": str(path), **FIXED[family], **found}, path)
    if window is not None and window < model.seq_len:  # attention over more costs less than the formulas say
        model = model.model_copy(update={"seq_len": window})
    head = _count(data, "head_dim", path)
    if head is not None and head * model.heads != model.hidden:
        raise UserError(f"head_dim {head} cannot be predicted: not hidden_size / heads", where=path)
    return model


def _count(data: dict[str, Any], key: str, path: Path) -> int | None:
    """The value of an optional key. Raises UserError unless it is 1 or more."""
    value: int | None = data.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise UserError(f"{key} is {value!r}", where=path, allowed="1 or more")
    return value


def _default(key: str, family: str) -> object:
    return True if (key, family) == ("tied_head", "gpt2") else OPTIONAL.get(key)
