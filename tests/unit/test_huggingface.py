"""A Hugging Face config.json as a model: parameters as transformers counts them; the rest is refused."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers

from lowband.errors import UserError
from tests.checkout import CONFIG


def shape(
    hidden: int, layers: int, heads: int, width: int, vocab: int = 32000, **more: object
) -> dict[str, object]:
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": width, "vocab_size": vocab, **more,
    }  # fmt: skip


SMALL = shape(64, 3, 4, 160, 300)
GROUPED = {**SMALL, "num_key_value_heads": 2, "max_position_embeddings": 128}
CASES = [
    ("llama", SMALL),
    ("llama", {**GROUPED, "tie_word_embeddings": True}),
    ("mistral", GROUPED),
    ("qwen2", GROUPED),
    ("qwen2", {**GROUPED, "tie_word_embeddings": True}),
    ("gpt_neox", SMALL),
    ("gpt_neox", {**SMALL, "intermediate_size": 256, "tie_word_embeddings": True}),
    ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4}),
    ("gpt2", {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_inner": 99}),
    ("llama", {**GROUPED, "attention_bias": True}),
    ("llama", {**GROUPED, "head_dim": 32}),
    ("mistral", {**GROUPED, "sliding_window": 32}),
    ("qwen3", {**GROUPED, "head_dim": 32}),
    ("gemma", {**GROUPED, "head_dim": 32}),
    ("gemma2", {**GROUPED, "head_dim": 32}),
    ("gemma3_text", {**GROUPED, "num_hidden_layers": 13, "head_dim": 32, "sliding_window": 32}),
    ("cohere", GROUPED),
]
SOME = {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2}
FEW = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LATENT = {
    **{k: v for k, v in GROUPED.items() if k != "num_key_value_heads"}, "num_key_value_heads": 4,
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 20, "first_k_dense_replace": 1,
    "n_shared_experts": 2,
}  # fmt: skip
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WITH_EXPERTS = [
    ("mixtral", SOME), ("qwen3_moe", {**FEW, "head_dim": 32}),
    ("qwen2_moe", {**FEW, "shared_expert_intermediate_size": 64}), ("gpt_oss", {**SOME, "head_dim": 32}),
    ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    ("deepseek_v3", {**LATENT, "q_lora_rank": 24, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}),
    *(
        ("llama4_text", {
            **SOME, **SPECIAL, "num_hidden_layers": 8, "num_experts_per_tok": 1, "intermediate_size_mlp": 96,
            "head_dim": 16, "interleave_moe_layer_step": step,
        })
        for step in (1, 2)
    ),
]  # fmt: skip


def saved(folder: Path, family: str, values: dict[str, object]) -> Path:
    """config.json as transformers writes it."""
    config = transformers.AutoConfig.for_model(family, **values)
    config.save_pretrained(folder / "model")
    return folder / "model" / "config.json"


@pytest.mark.parametrize(("family", "values"), [*CASES, *WITH_EXPERTS])
def test_parameters_are_those_that_transformers_counts(
    family: str, values: dict[str, object], tmp_path: Path
) -> None:
    path = saved(tmp_path, family, values)
    config = transformers.AutoConfig.from_pretrained(path.parent)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    model = CONFIG.given_model(str(path))
    assert model.parameters == sum(p.numel() for p in module.parameters())
    assert (model.name, model.seq_len) == ("model", config.max_position_embeddings)
    for ndim in (2, 3):
        ours = [math.prod(s) for unit in model.unit_shapes() for s in unit if len(s) == ndim]
        assert sum(p.numel() for p in module.parameters() if p.ndim == ndim) == sum(ours)


@pytest.mark.parametrize("key", ["sliding_window", "head_dim"])
@pytest.mark.parametrize("value", ["x", "128", 1.5, [128], 0, -1, True])
def test_an_optional_count_is_a_count(key: str, value: object, tmp_path: Path) -> None:
    path = saved(tmp_path, "mistral", GROUPED)
    path.write_text(json.dumps({**json.loads(path.read_text()), "head_dim": None, key: value}))
    with pytest.raises(UserError, match=f"config.json: {key} is .*1 or more"):
        CONFIG.given_model(str(path))


LONG = {"num_key_value_heads": 8, "max_position_embeddings": 8192}
LONGER = {**LONG, "max_position_embeddings": 131072}
PUBLISHED = {
    "llama-7b": shape(4096, 32, 32, 11008),
    "llama-13b": shape(5120, 40, 40, 13824),
    "llama-3-8b": shape(4096, 32, 32, 14336, 128256, **LONG),
    "llama-3-70b": shape(8192, 80, 64, 28672, 128256, **LONG),
    "llama-3.1-8b": shape(4096, 32, 32, 14336, 128256, **LONGER),
    "llama-3.1-70b": shape(8192, 80, 64, 28672, 128256, **LONGER),
    "llama-3.1-405b": shape(16384, 126, 128, 53248, 128256, **LONGER),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_named_llamas_are_the_published_shapes(name: str, tmp_path: Path) -> None:
    named = CONFIG.model(name)
    read = CONFIG.given_model(str(saved(tmp_path, "llama", PUBLISHED[name])))
    kept = {"name": name, "source": named.source, "kv_heads": named.kv_heads}
    assert named == read.model_copy(update=kept)
    assert named.kv_hidden == read.kv_hidden
    billions = {
        "llama-7b": 6.738, "llama-13b": 13.016, "llama-3-8b": 8.030, "llama-3-70b": 70.554,
        "llama-3.1-8b": 8.030, "llama-3.1-70b": 70.554, "llama-3.1-405b": 405.853,
    }[name]  # fmt: skip
    assert named.parameters / 1e9 == pytest.approx(billions, abs=5e-4)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' cannot be predicted"),
        ({"model_type": "t5"}, "model_type 't5' cannot be predicted"),
        ({}, "model_type None cannot be predicted"),
        ([], "model_type None cannot be predicted"),
        ({"model_type": "llama"}, "key 'num_hidden_layers' is missing"),
        ({"num_experts": 4}, "num_experts 4 cannot be predicted for llama"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window True"),
        ({"model_type": "qwen3_moe", **FEW, "mlp_only_layers": [1]}, "layers without experts"),
        *(
            ({"model_type": "qwen2_moe", **FEW, **of}, "a shared expert of")
            for of in (
                {"shared_expert_intermediate_size": 48},
                {"shared_expert_intermediate_size": "64"},
                {"moe_intermediate_size": 0, "shared_expert_intermediate_size": 64},
            )
        ),
        ({"model_type": "gemma2", "sliding_window": 8, "layer_types": ["full_attention", "x", "x"]}, "order"),
        ({"model_type": "deepseek_v2", **LATENT, "attention_bias": True}, "attention_bias True"),
        ({"model_type": "deepseek_v2", **LATENT, "moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"head_dim": 33}, "an even head size"),
        ({"num_hidden_layers": "x"}, "layers"),
        ({"num_attention_heads": 5}, "not a multiple of heads"),
        ({"model_type": "gpt_neox", "attention_bias": False}, "attention_bias False"),
    ],
)
def test_anything_else_is_refused_in_one_line(data: object, words: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    whole = {"model_type": "llama", **GROUPED}
    partial = data in ({}, [], {"model_type": "llama"})
    path.write_text(json.dumps(data if partial else {**whole, **data}))  # type: ignore[dict-item]
    with pytest.raises(UserError, match=words) as error:
        CONFIG.given_model(str(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_windows_as_files_have_them(tmp_path: Path) -> None:
    def read(family: str, **values: object) -> tuple[object, object]:
        path = saved(tmp_path, family, {**GROUPED, "num_hidden_layers": 12, **values})
        model = CONFIG.given_model(str(path))
        bare = {k: v for k, v in json.loads(path.read_text()).items() if k != "layer_types"}
        path.write_text(json.dumps(bare))
        assert CONFIG.given_model(str(path)) == model  # by the family's own rule
        return model.window, model.full_every

    assert read("mistral", sliding_window=32) == (32, None)
    assert read("mistral", sliding_window=None) == (None, None)
    assert read("gemma2", sliding_window=32) == (32, 2)
    assert read("gemma3_text", sliding_window=32) == (32, 6)
    assert read("gpt_oss", sliding_window=32, num_local_experts=4) == (32, 2)


@pytest.mark.parametrize(("wide", "one", "count"), [(64, 32, 2), (3, 1, 3)])
def test_a_wide_shared_expert_is_several(wide: int, one: int, count: int, tmp_path: Path) -> None:
    of = {"shared_expert_intermediate_size": wide, "moe_intermediate_size": one}
    path = saved(tmp_path, "qwen2_moe", {**FEW, **of})
    assert CONFIG.given_model(str(path)).shared_experts == count


def test_biases_that_a_gpt_neox_does_not_mention_are_there(tmp_path: Path) -> None:
    path = saved(tmp_path, "gpt_neox", SMALL)
    whole = CONFIG.given_model(str(path))
    data = json.loads(path.read_text())
    assert data.pop("attention_bias") is True
    path.write_text(json.dumps(data))
    assert CONFIG.given_model(str(path)) == whole


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        CONFIG.given_model(str(path))
    with pytest.raises(UserError, match="cannot be read"):
        CONFIG.given_model(str(tmp_path / "none.json"))
