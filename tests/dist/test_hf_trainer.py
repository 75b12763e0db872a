"""Hugging Face's Trainer, and a loop of Accelerate, on a sharded module: beside the same on the plain one."""

import json
import os
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from near import assert_near
from safetensors.torch import load_file
from test_examples import EXAMPLES, TEXT, run, set_up, write_llama
from torch import nn
from transformers import LlamaForCausalLM

import lowband
from lowband.run.launch import run_local
from lowband.run.on_ranks import on_ranks
from lowband.run.ranks import Rank
from tests.ports import held_port


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    on_ranks(1, write_llama, folder)
    return folder


def test_hugging_faces_trainer_trains_as_on_one_process_and_goes_on_where_it_was_cut(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses, norms before clipping, losses of evaluation; two passes a step, the first under no_sync."""
    plain_no_sync, entered = lowband.no_sync, tmp_path / "entered"

    def no_sync(module: torch.nn.Module) -> AbstractContextManager[None]:
        with entered.open("a") as file:
            file.write("x")
        return plain_no_sync(module)

    monkeypatch.setattr(lowband, "no_sync", no_sync)
    text = tmp_path / "text"
    text.write_bytes((TEXT.read_bytes() * 3)[: 64 * (4 + 8 * 8) + 1])  # to evaluate, and for 8 steps of 8
    arguments = ["--text", text, "--dtype", "float32", "--steps"]
    run(2, "hf_trainer.py", llama, tmp_path / "whole", *arguments, 8)
    assert entered.read_text() == "x" * 2 * 8
    whole = history(tmp_path / "whole")
    [plain] = on_ranks(1, plainly_trained, llama, text, tmp_path / "plain")
    assert [step for step, _ in whole] == [step for step, _ in plain] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8]
    for (_, ours), (_, theirs) in zip(whole, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5)
    assert whole[8][1][0] < whole[0][1][0] - 0.3
    run(2, "hf_trainer.py", llama, tmp_path / "cut", *arguments, 4)
    (tmp_path / "cut" / "checkpoint-6").mkdir()  # killed while it was written
    run(2, "hf_trainer.py", llama, tmp_path / "cut", *arguments, 8)
    assert history(tmp_path / "cut") == whole
    written = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "cut", "plain"))
    for ours, resumed, theirs in zip(*(one.items() for one in written), strict=True):
        assert ours[0] == theirs[0]
        assert torch.equal(ours[1], resumed[1])
        torch.testing.assert_close(ours[1], theirs[1], rtol=1e-3, atol=1e-5)


def history(folder: Path) -> list[tuple[int, list[float]]]:
    """Each step with the loss and the norm, or with the loss of the evaluation."""
    log = json.loads((folder / "checkpoint-8" / "trainer_state.json").read_text())["log_history"]
    named = ("loss", "grad_norm", "eval_loss")
    return [(row["step"], [row[name] for name in named if name in row]) for row in log]


def plainly_trained(llama: Path, file: Path, folder: Path) -> list[tuple[int, list[float]]]:
    """Trainer on the same model, not sharded, in one process that takes the batches of both ranks at once."""
    sys.path.insert(0, str(EXAMPLES))
    from hf_trainer import LENGTH, Trainer, arguments, tokens_of

    model = LlamaForCausalLM.from_pretrained(llama)
    text = [{"input_ids": part, "labels": part} for part in tokens_of(file, model).split(LENGTH)[:-1]]
    args = arguments(folder, 8, per_device_train_batch_size=4)
    trainer = Trainer(model, args, train_dataset=text[4:], eval_dataset=text[:4])
    trainer.train()
    trainer.save_model()
    return history(folder)


def test_what_trainer_would_do_to_shards_is_refused_in_one_line(tmp_path: Path) -> None:
    [said] = on_ranks(1, refused_by_trainer, tmp_path)
    assert len(said) == 6
    for name, line in said.items():
        assert line.startswith(f"{name}: {name} with a sharded module (allowed: ")


def refused_by_trainer(folder: Path) -> dict[str, str]:
    sys.path.insert(0, str(EXAMPLES))
    from hf_trainer import REFUSED, ShardedTrainer, arguments

    said = {}
    for name in REFUSED:
        args = arguments(folder, 1)
        object.__setattr__(args, name, True)
        with pytest.raises(lowband.UserError) as error:
            ShardedTrainer(torch.nn.Linear(1, 1), args)
        said[name] = str(error.value)
    return said


def test_adopted_by_accelerate_a_module_trains_as_the_plain_one(tmp_path: Path) -> None:
    """Two passes a step, under accelerate's own accumulate and clipping, prepared with optimizer and data."""
    port = held_port()

    def work(rank: Rank) -> None:
        set_up(rank, port)
        torch.save(looped(), tmp_path / f"{rank.rank}.pt")
        dist.barrier()
        os._exit(0)  # see run.launch

    run_local(2, work, 120)
    ours, norms = torch.load(tmp_path / "0.pt")
    assert torch.load(tmp_path / "1.pt") == ({}, norms)
    [(theirs, plain_norms)] = on_ranks(1, plainly_looped)
    assert norms == pytest.approx(plain_norms, rel=1e-5)
    assert max(norms) > MOST > 0
    assert_near(ours, theirs, rtol=1e-5, atol=1e-6)


MOST = 0.05  # of the norm


def made() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)), torch.randn(24, 5)


def looped() -> tuple[dict[str, torch.Tensor], list[float]]:
    from accelerate import Accelerator
    from hf_trainer import adopt

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, data = made()
    lowband.shard(model, "zero3", lowband.Topology({}), wrap=nn.Linear, compute_dtype=torch.float32)
    adopt(model, accelerator)
    batches = torch.utils.data.DataLoader(data, batch_size=2)
    model, optimizer, batches = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), batches)
    norms = []
    for x in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            if accelerator.sync_gradients:
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), MOST)))
            optimizer.step()
            optimizer.zero_grad()
    return lowband.full_state_dict(model), norms


def plainly_looped() -> tuple[dict[str, torch.Tensor], list[float]]:
    model, data = made()
    optimizer, norms = torch.optim.AdamW(model.parameters()), []
    for x in data.split(8):  # two passes of two ranks, two samples each
        model(x).square().mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), MOST)))
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}, norms
