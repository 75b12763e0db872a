"""Files of other projects: DeepSpeed's JSON, Hugging Face's config.json and safetensors, logs, tokens."""

import io
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save

from lowband.engine.checkpoint.dcp_reader import METADATA, DcpReader
from lowband.engine.checkpoint.deepspeed_reader import DeepSpeedReader
from lowband.engine.checkpoint.safetensors_files import INDEX, SINGLE, Safetensors
from lowband.engine.checkpoint.stored import Reader, read_as_damaged
from lowband.evidence.importers import FORMATS, ForeignRun, import_log
from lowband.model.data import batch, read_corpus
from lowband.spec.exchange import import_scheme
from lowband.spec.huggingface import model_of_config
from tests.checkout import CONFIG
from tests.fuzz.target import Target, sound

SOUND = CONFIG
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
GPT_OSS = LLAMA.replace("llama", "gpt_oss").replace(
    "}",
    """, "num_local_experts": 4, "num_experts_per_tok": 2,
 "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"]}""",
)
DEEPSEEK_V3 = LLAMA.replace("llama", "deepseek_v3").replace(
    "}",
    """, "n_routed_experts": 4, "num_experts_per_tok": 2,
 "moe_intermediate_size": 64, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 64,
 "q_lora_rank": null, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}""",
)
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


def _read(root: Path, open_: Callable[[], Reader]) -> None:
    """Read every tensor and option, as `load_peer_checkpoint` does where shapes are the module's."""
    with read_as_damaged(root):
        reader = open_()
        for name, tensor in TENSORS.items():
            found = {"": reader.tensor(name), **reader.states(name)}
            for stored in found.values():
                if getattr(stored, "shape", None) == tuple(tensor.shape):
                    stored.read(0, tensor.numel()).float()
            reader.options(name)
        reader.extra()


def _dcp() -> dict[str, bytes]:
    """The files of a checkpoint of DCP, by name."""
    state = {"model": TENSORS, "optimizer": {"state": {"b": {"exp_avg": TENSORS["b"]}}}, "step": 3}
    with tempfile.TemporaryDirectory() as folder:
        dcp.save(state, checkpoint_id=folder, no_dist=True)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def _zero(root: Path) -> None:
    """DeepSpeed's model file beside the optimizer file of its only rank."""
    shapes = {name: tensor.shape for name, tensor in TENSORS.items()}
    torch.save({"param_shapes": [shapes], "buffer_names": []}, root / "mp_rank_00_model_states.pt")


def _zero_optimizer() -> bytes:
    flat = torch.cat([tensor.reshape(-1) for tensor in TENSORS.values()])
    adam = {"state": {0: {"exp_avg": flat, "step": 3}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    state = {
        "single_partition_of_fp32_groups": [flat], "base_optimizer_state": adam, "partition_count": [1],
    }  # fmt: skip
    torch.save({"optimizer_state_dict": state}, made := io.BytesIO())
    return made.getvalue()


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
    saved = _dcp()
    [values] = set(saved) - {METADATA}
    zero = "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    return [
        at("DeepSpeed JSON", "ds.json", "json", DEEPSPEED, _scheme),
        at("Hugging Face config.json", "hf.json", "json", LLAMA,
           lambda root: model_of_config(root / "hf.json"), more=(MISTRAL, NEOX, GPT2, GPT_OSS, DEEPSEEK_V3)),
        at("safetensors index", INDEX, "json", index, _tensors, prepare=_put_tensors),
        at("safetensors", SINGLE, "lines", raw, _tensors, seal=_latin),
        *(
            at(f"DCP: {name}", name, "lines", saved[name].decode("latin-1"),
               lambda root: _read(root, lambda: DcpReader(root, list(TENSORS))), seal=_latin,
               prepare=lambda root, other=other: (root / other).write_bytes(saved[other]))
            for name, other in ((METADATA, values), (values, METADATA))
        ),
        at("DeepSpeed's optimizer file", zero, "lines", _zero_optimizer().decode("latin-1"),
           lambda root: _read(root, lambda: DeepSpeedReader(root)), seal=_latin, prepare=_zero),
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
