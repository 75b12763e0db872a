"""The program that trains a GPT with experts beside a dense one, on few steps, against one process."""

import pytest
import torch

import lowband
from lowband.model.data import STDLIB, batch, read_corpus
from lowband.model.gpt import GPT
from lowband.run import expert_losses
from lowband.run.on_ranks import on_ranks
from lowband.spec.model import ModelSpec

STEPS = 2


def alone(spec: ModelSpec) -> tuple[list[float], list[list[float]]]:
    """Losses of its steps, and of each layer the load of the expert that has most, over the mean."""
    text, model = read_corpus(STDLIB).train, GPT(spec, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=expert_losses.LEARNING_RATE)
    losses, loads = [], []
    for step in range(STEPS):
        count = expert_losses.SEQUENCES
        loss = model(*map(torch.from_numpy, batch(text, 0, step, 0, count, count, spec.seq_len)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), expert_losses.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        counts = lowband.balance_experts(model).values()
        loads.append([float(load.max() / load.double().mean()) for load in counts])
    return losses, loads


def test_rows_are_those_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_losses, "SEEDS", 1)
    monkeypatch.setattr(expert_losses, "WINDOW", 1)
    monkeypatch.setattr(expert_losses, "VALIDATIONS", 1)
    losses, loads, ends = expert_losses.measure(STEPS)
    assert [(row.way, row.step) for row in losses] == [
        (way, step) for way in expert_losses.models() for step in (1, 2)
    ]
    for way, spec in expert_losses.models().items():
        [(expected, of_layers)] = on_ranks(1, alone, spec)
        assert [row.loss for row in losses if row.way == way] == pytest.approx(expected, rel=1e-5)
        found = [row.max_over_mean for row in loads if row.way == way]
        assert found == pytest.approx([ratio for of_step in of_layers for ratio in of_step], rel=0.02)
        assert [row.of_window for row in loads if row.way == way] == pytest.approx(found)  # of a step alone
    dense, *others = [row.flops_per_token for row in ends]
    assert others == [pytest.approx(dense, rel=0.005)] * 2
    assert all(4 < row.validation_loss < 6 for row in ends)


def test_a_windows_load_is_of_all_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two steps, each with one full expert, and not the same one: together they are even."""
    monkeypatch.setattr(expert_losses, "SEEDS", 1)
    counts = torch.tensor([[[4, 0], [0, 4], [3, 1]]])
    found = expert_losses.Found([1.0, 1.0, 1.0], counts, 1.0)
    monkeypatch.setattr(expert_losses, "on_ranks", lambda *_, **__: [found])
    monkeypatch.setattr(expert_losses, "WINDOW", 2)
    _, loads, _ = expert_losses.measure(3)
    mine = [(row.step, row.max_over_mean, row.of_window) for row in loads if row.way == "experts"]
    assert mine == [(2, 2.0, 1.0), (3, 1.5, 1.5)]
