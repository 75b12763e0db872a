"""Hugging Face checkpoints: real files, read by ranges under several schemes, and written again."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from test_parity import INNER
from torch import nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXLayer, GPTNeoXRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

import lowband
from lowband.engine.checkpoint import safetensors_files
from lowband.errors import UserError
from lowband.run.on_ranks import on_ranks
from tests.checkout import CONFIG
from tests.refused import refusal

SIZES = {
    "vocab_size": 67,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
TOKENS = torch.arange(22).view(2, 11) % 67
KINDS: dict[str, Any] = {
    "llama": (LlamaConfig(**SIZES, num_key_value_heads=2), LlamaForCausalLM, LlamaDecoderLayer),
    "llama-tied": (LlamaConfig(**SIZES, tie_word_embeddings=True), LlamaForCausalLM, LlamaDecoderLayer),
    "gpt-neox": (GPTNeoXConfig(**SIZES), GPTNeoXForCausalLM, GPTNeoXLayer),
}


def built(kind: str) -> nn.Module:
    """The model on the meta device, but for the rotary embedding's frequencies, which no file has."""
    config, model_class, _ = KINDS[kind]
    with torch.device("meta"):
        model = model_class(config)
    model.tie_weights()
    if kind == "gpt-neox":
        model.gpt_neox.rotary_emb = GPTNeoXRotaryEmbedding(config)
    else:
        model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, float]:
    """Kind, folder and loss of a model that transformers made and wrote in several files."""
    [loss] = on_ranks(1, written, request.param, folder := tmp_path_factory.mktemp(request.param))
    assert (folder / safetensors_files.INDEX).is_file()
    return request.param, folder, loss


def written(kind: str, folder: Path) -> float:
    config, model_class, _ = KINDS[kind]
    torch.manual_seed(5)
    model = model_class(config)
    model.save_pretrained(folder, max_shard_size="8KB")
    return float(model(TOKENS, labels=TOKENS).loss)


def loss_of(kind: str, folder: Path) -> float:
    return float(KINDS[kind][1].from_pretrained(folder)(TOKENS, labels=TOKENS).loss)


def loss_and_copy(kind: str, folder: Path, scheme: str, copy: Path) -> tuple[float, int]:
    """The sharded model's loss, and the most values that this rank read at once."""
    most = 0
    read = safetensors_files.FlatTensor.__getitem__

    def counted(flat: safetensors_files.FlatTensor, part: slice) -> torch.Tensor:
        nonlocal most
        most = max(most, part.stop - part.start)
        return read(flat, part)

    safetensors_files.FlatTensor.__getitem__ = counted  # type: ignore[method-assign]

    def name_of(name: str) -> str:
        """GPT-NeoX's files name the output layer otherwise."""
        return name.replace("lm_head", "embed_out") if kind == "gpt-neox" else name

    model = built(kind)
    lowband.shard(
        model, CONFIG.scheme(scheme), lowband.Topology(INNER), KINDS[kind][2], torch.float32,
        init=lowband.Safetensors(folder, name_of),
    )  # fmt: skip
    loss = float(model(TOKENS, labels=TOKENS).loss)
    lowband.save_safetensors(model, copy, name_of=name_of)
    return loss, most


@pytest.mark.parametrize(
    ("ranks", "scheme"),
    [
        (1, "hier3-exact"), (4, "zero3"),
        *(pytest.param(*case, marks=pytest.mark.wide) for case in ((1, "zero3"), (4, "hier3-exact"))),
    ],
)  # fmt: skip
def test_the_loss_is_the_unsharded_models(
    checkpoint: tuple[str, Path, float], ranks: int, scheme: str, tmp_path: Path
) -> None:
    kind, folder, expected = checkpoint
    by_rank = on_ranks(ranks, loss_and_copy, kind, folder, scheme, tmp_path / "copy")
    assert all(loss == pytest.approx(expected, rel=1e-6) for loss, _ in by_rank)
    copied, original = (tensors_of(path) for path in (tmp_path / "copy", folder))
    assert copied.keys() == original.keys()
    assert all(torch.equal(copied[name], original[name]) for name in original)
    for path in folder.glob("*config.json"):
        shutil.copy(path, tmp_path / "copy")
    assert on_ranks(1, loss_of, kind, tmp_path / "copy") == [expected]  # transformers reads what we write
    if ranks > 1 and scheme == "zero3":
        assert max(most for _, most in by_rank) < max(value.numel() for value in original.values())


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    files = {*json.loads((folder / safetensors_files.INDEX).read_text())["weight_map"].values()}
    return {name: value for file in files for name, value in load_file(folder / file).items()}


def refused(folder: Path, device: str = "meta") -> str:
    with torch.device(device):
        model = nn.Linear(3, 5)
    return refusal(
        lambda: lowband.shard(
            model, CONFIG.scheme("zero3"), lowband.Topology({}), nn.Linear, init=lowband.Safetensors(folder)
        )
    )


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "no checkpoint"),
        ({"weight": torch.zeros(5, 3)}, "no tensor 'bias'"),
        ({"weight": torch.zeros(3, 5), "bias": torch.zeros(5)}, "'weight' has shape (3, 5)"),
        (b"\xff" * 64, "cannot be read"),
    ],
)
def test_bad_checkpoints_are_refused(content: Any, words: str, tmp_path: Path) -> None:
    path = tmp_path / safetensors_files.SINGLE
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        save_file(content, path)
    # On four ranks some hold nothing of what is missing, and do not look for it.
    assert all(words in found for ranks in (1, 4) for found in on_ranks(ranks, refused, tmp_path))


def test_files_that_a_module_with_values_would_not_read_are_refused(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(5, 3), "bias": torch.zeros(5)}, tmp_path / safetensors_files.SINGLE)
    assert on_ranks(1, refused, tmp_path, "cpu") == [
        "Linear: the module has values, so that no file of init would be read (allowed: a module on the meta "
        "device; no init)"
    ]


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": {"weight": "../x"}}'])
def test_bad_indices_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / safetensors_files.INDEX).write_text(text)
    with pytest.raises(UserError, match=safetensors_files.INDEX):
        lowband.Safetensors(tmp_path)


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))


def through_files(folder: Path) -> tuple[dict[str, torch.Tensor], str]:
    """The state after writing and reading under other names, and the refusal of one name for two tensors."""
    model = lowband.shard(normed(), CONFIG.scheme("zero3"), lowband.Topology({}), nn.Linear, torch.float32)
    with pytest.raises(UserError) as error:
        lowband.save_safetensors(model, folder, name_of=lambda name: "same")
    lowband.save_safetensors(model, folder, name_of="stored.{}".format)
    with torch.device("meta"):
        again = normed()
    source = lowband.Safetensors(folder, "stored.{}".format)
    lowband.shard(again, CONFIG.scheme("zero3"), lowband.Topology({}), nn.Linear, torch.float32, init=source)
    return lowband.full_state_dict(again), str(error.value)


def written_again(folder: Path) -> list[str]:
    """What is said of a folder that holds one file, or several with an index."""
    said = []
    for name, wrap in ((safetensors_files.SINGLE, ()), (safetensors_files.INDEX, nn.Linear)):
        model = lowband.shard(normed(), CONFIG.scheme("zero3"), lowband.Topology({}), wrap, torch.float32)
        lowband.save_safetensors(model, folder / f"with {name}")
        if dist.get_rank() == 0:
            assert (folder / f"with {name}" / name).is_file()
        for parameter in model.parameters():
            parameter.data.zero_()
        said.append(refusal(lowband.save_safetensors, model, folder / f"with {name}"))
    return said


def test_a_checkpoint_is_not_written_over(tmp_path: Path) -> None:
    for said in on_ranks(2, written_again, tmp_path):
        assert all("there is a checkpoint already (allowed: a new folder)" in each for each in said)
    for path in tmp_path.glob("*/*.safetensors"):
        assert all(value.any() for name, value in load_file(path).items() if name.endswith("weight"))


def unwritable(folder: Path) -> list[str]:
    """What is said where the second of three files cannot be written, and where no folder can be."""
    said = []
    for name in ("taken", "file/folder"):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.LayerNorm(4))
        model = lowband.shard(model, CONFIG.scheme("zero3"), lowband.Topology({}), nn.Linear, torch.float32)
        said.append(refusal(lowband.save_safetensors, model, folder / name))
    return said


def of_a_foreign_type(folder: Path) -> str:
    model = nn.Linear(3, 4)
    model.register_buffer("phases", torch.zeros(2, dtype=torch.complex128))
    model = lowband.shard(model, CONFIG.scheme("zero3"), lowband.Topology({}), nn.Linear, torch.float32)
    return refusal(lowband.save_safetensors, model, folder / "new")


def test_a_buffer_of_a_type_that_the_format_has_not_is_refused_on_every_rank(tmp_path: Path) -> None:
    for said in on_ranks(2, of_a_foreign_type, tmp_path):
        assert "cannot be written" in said and "complex128" in said and "\n" not in said


def test_a_file_that_cannot_be_written_is_named_on_every_rank(tmp_path: Path) -> None:
    second_file = tmp_path / "taken" / "model-00002-of-00003.safetensors"
    second_file.mkdir(parents=True)
    (tmp_path / "file").touch()
    for said in on_ranks(2, unwritable, tmp_path):
        assert said == [
            f"{second_file}: cannot be written: Is a directory",
            f"{tmp_path}/file/folder/model-00001-of-00003.safetensors: cannot be written: Not a directory",
        ]
    assert [*second_file.parent.iterdir()] == [second_file]


def test_buffers_scalars_and_names(tmp_path: Path) -> None:
    torch.manual_seed(3)
    expected = normed().state_dict()
    torch.manual_seed(3)
    (state, refusal), _ = on_ranks(2, through_files, tmp_path)
    assert "two tensors are named 'same'" in refusal
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert state["1.num_batches_tracked"].dtype == torch.long


def save_by_transformers(folder: Path) -> tuple[str, bool, float]:
    """What `save_pretrained` says of a sharded model, whether it wrote one, and the loss of the model."""
    config, model_class, wrap = KINDS["llama"]
    torch.manual_seed(5)
    model = model_class(config)
    lowband.shard(model, "zero3", lowband.Topology({}), wrap, compute_dtype=torch.float32)
    loss = float(model(TOKENS, labels=TOKENS).loss)
    with pytest.raises(UserError) as error:
        model.save_pretrained(folder)
    is_written = any(folder.glob("*.safetensors"))
    dist.barrier()
    whole = lowband.full_state_dict(model)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=whole)
    return str(error.value), is_written, loss


def test_save_pretrained_takes_the_whole_state_only(tmp_path: Path) -> None:
    found = on_ranks(2, save_by_transformers, tmp_path)
    for said, is_written, _ in found:
        assert said.startswith("LlamaForCausalLM: state_dict() of a sharded module would hold")
        assert "\n" not in said
        assert not is_written
    [again] = on_ranks(1, loss_of, "llama", tmp_path)
    assert again == found[0][2]
