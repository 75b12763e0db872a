"""A Hugging Face config.json as a model: parameters as transformers counts them; the rest is refused."""

import json
from pathlib import Path

import pytest
import torch
import transformers

from lowband.errors import UserError
from lowband.spec.config import Config

ROOT = Path(__file__).parents[2]


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
    ("llama", SMALL), ("llama", {**GROUPED, "tie_word_embeddings": True}), ("mistral", GROUPED),
    ("qwen2", GROUPED), ("qwen2", {**GROUPED, "tie_word_embeddings": True}), ("gpt_neox", SMALL),
    ("gpt_neox", {**SMALL, "intermediate_size": 256, "tie_word_embeddings": True}),
    ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4}),
    ("gpt2", {"n_embd": 64, "n_layer": 1, "n_head": 2, "n_inner": 99}),
]  # fmt: skip


def saved(folder: Path, family: str, values: dict[str, object]) -> Path:
    """config.json as transformers writes it."""
    config = transformers.AutoConfig.for_model(family, **values)
    config.save_pretrained(folder / "model")
    return folder / "model" / "config.json"


@pytest.mark.parametrize(("family", "values"), CASES)
def test_parameters_are_those_that_transformers_counts(
    family: str, values: dict[str, object], tmp_path: Path
) -> None:
    path = saved(tmp_path, family, values)
    config = transformers.AutoConfig.from_pretrained(path.parent)
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config)
    model = Config(ROOT).given_model(str(path))
    assert model.parameters == sum(p.numel() for p in module.parameters())
    assert (model.name, model.seq_len) == ("model", config.max_position_embeddings)
    matrices = sum(p.numel() for p in module.parameters() if p.ndim == 2)
    ours = [s for unit in model.unit_shapes() for s in unit if len(s) == 2]
    assert matrices == sum(rows * columns for rows, columns in ours)


@pytest.mark.parametrize("key", ["sliding_window", "head_dim"])
@pytest.mark.parametrize("value", ["x", "128", 1.5, [128], 0, -1, True])
def test_an_optional_count_is_a_count(key: str, value: object, tmp_path: Path) -> None:
    path = saved(tmp_path, "mistral", GROUPED)
    path.write_text(json.dumps({**json.loads(path.read_text()), "head_dim": None, key: value}))
    with pytest.raises(UserError, match=f"config.json: {key} is .*1 or more"):
        Config(ROOT).given_model(str(path))


LONG = {"num_key_value_heads": 8, "max_position_embeddings": 8192}
PUBLISHED = {
    "llama-7b": shape(4096, 32, 32, 11008),
    "llama-13b": shape(5120, 40, 40, 13824),
    "llama-3-8b": shape(4096, 32, 32, 14336, 128256, **LONG),
    "llama-3-70b": shape(8192, 80, 64, 28672, 128256, **LONG),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_named_llamas_are_the_published_shapes(name: str, tmp_path: Path) -> None:
    named = Config(ROOT).model(name)
    read = Config(ROOT).given_model(str(saved(tmp_path, "llama", PUBLISHED[name])))
    kept = {"name": name, "source": named.source, "kv_heads": named.kv_heads}
    assert named == read.model_copy(update=kept)
    assert named.kv_hidden == read.kv_hidden
    billions = {"llama-7b": 6.738, "llama-13b": 13.016, "llama-3-8b": 8.030, "llama-3-70b": 70.554}[name]
    assert named.parameters / 1e9 == pytest.approx(billions, abs=5e-4)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"model_type": "mixtral"}, "model_type 'mixtral' cannot be predicted"),
        ({"model_type": "t5"}, "model_type 't5' cannot be predicted"),
        ({}, "model_type None cannot be predicted"),
        ([], "model_type None cannot be predicted"),
        ({"model_type": "llama"}, "key 'num_hidden_layers' is missing"),
        ({"attention_bias": True}, "attention_bias True cannot be predicted for llama"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"head_dim": 128}, "head_dim 128 cannot be predicted"),
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
        Config(ROOT).given_model(str(path))
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_window_bounds_the_sequences_that_the_formulas_cover(tmp_path: Path) -> None:
    path = saved(tmp_path, "mistral", {**GROUPED, "sliding_window": 32})
    assert Config(ROOT).given_model(str(path)).seq_len == 32


def test_biases_that_a_gpt_neox_does_not_mention_are_there(tmp_path: Path) -> None:
    path = saved(tmp_path, "gpt_neox", SMALL)
    whole = Config(ROOT).given_model(str(path))
    data = json.loads(path.read_text())
    assert data.pop("attention_bias") is True
    path.write_text(json.dumps(data))
    assert Config(ROOT).given_model(str(path)) == whole


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(UserError, match="is not JSON"):
        Config(ROOT).given_model(str(path))
    with pytest.raises(UserError, match="cannot be read"):
        Config(ROOT).given_model(str(tmp_path / "none.json"))
