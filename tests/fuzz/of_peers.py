"""Files of other projects: DeepSpeed's JSON, Hugging Face's config.json and safetensors, logs, tokens."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save

from lowband.engine.checkpoint.safetensors_files import INDEX, SINGLE, Safetensors
from lowband.evidence.importers import FORMATS, ForeignRun, import_log
from lowband.model.data import batch, read_corpus
from lowband.spec.config import Config
from lowband.spec.exchange import import_scheme
from lowband.spec.huggingface import model_of_config
from tests.fuzz.target import ROOT, Target, sound

SOUND = Config(ROOT)
DEEPSPEED = """{"train_batch_size": 16, "bf16": {"enabled": true}, "zero_optimization": {"stage": 3,
 "zero_hpz_partition_size": 8, "zero_quantized_weights": true, "overlap_comm": true}}"""
LLAMA = """{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
 "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 4096,
 "tie_word_embeddings": false, "hidden_act": "silu", "rms_norm_eps": 1e-5, "head_dim": 128}"""
MISTRAL = LLAMA.replace("llama", "mistral").replace("}", ', "sliding_window": 4096}')
NEOX = """{"model_type": "gpt_neox", "hidden_size": 6144, "intermediate_size": 24576, "num_hidden_layers": 44,
 "num_attention_heads": 64, "vocab_size": 50432, "max_position_embeddings": 2048, "attention_bias": true}"""
GPT2 = """{"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257,
 "n_positions": 1024}"""
TENSORS = {"a.weight": torch.arange(12.0).reshape(4, 3), "b": torch.ones(3), "c": torch.tensor(1.0)}


def _scheme(root: Path) -> None:
    import_scheme(SOUND, root / "ds.json", "frontier", 16)


def _tensors(root: Path) -> None:
    """Read every tensor of the checkpoint by ranges."""
    files = Safetensors(root)
    for name, tensor in TENSORS.items():
        with files.flat(name, tensor.shape) as flat:
            flat[0 : tensor.numel()], flat[1:2]


def _put_tensors(root: Path) -> None:
    (root / "model-1.safetensors").write_bytes(save(TENSORS))


def _tokens(root: Path, name: str) -> None:
    corpus = read_corpus(str(root / name))
    batch(corpus.train, 1, 0, 0, 1, 1, 8)


def _log(form: str) -> Callable[[Path], object]:
    model = SOUND.model("gpt-20b")
    return lambda root: import_log(root / "run.log", form, ForeignRun(model, 2048, 8), root / "out.csv")


def targets() -> list[Target]:
    at = partial(Target, group="peers' files")
    index = json.dumps({"metadata": {}, "weight_map": dict.fromkeys(TENSORS, "model-1.safetensors")})
    raw = save(TENSORS).decode("latin-1")
    return [
        at("DeepSpeed JSON", "ds.json", "json", DEEPSPEED, _scheme),
        at("Hugging Face config.json", "hf.json", "json", LLAMA,
           lambda root: model_of_config(root / "hf.json"), more=(MISTRAL, NEOX, GPT2)),
        at("safetensors index", INDEX, "json", index, _tensors, prepare=_put_tensors),
        at("safetensors", SINGLE, "lines", raw, _tensors, seal=_latin),
        at("text file", "text.txt", "lines", "some text of a stranger\n" * 20,
           lambda root: _tokens(root, "text.txt")),
        at("tokens", "tokens.bin", "lines", "ab" * 100, lambda root: _tokens(root, "tokens.bin")),
        *(
            at(f"log: {form}", "run.log", "lines", sound(f"tests/fixtures/foreign/{form}.log"), _log(form),
               group="foreign logs")
            for form in FORMATS
        ),
    ]  # fmt: skip


def _latin(data: bytes) -> bytes:
    """The bytes of a binary file that was mutated as text of one byte a character."""
    return data.decode("utf-8", "replace").encode("latin-1", "replace")
