"""Checkpoints of runs whose sequences lie over ranks along context: read under any other division of them."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from started import goes_on_with_the_same_bits

import lowband
from lowband.model.gpt import GPT
from lowband.model.gpt import on_ranks as on_job
from lowband.run.on_ranks import on_ranks
from lowband.spec.model import ModelSpec
from tests.checkout import CONFIG

MODEL = ModelSpec(name="small", layers=2, hidden=32, heads=4, vocab=64, seq_len=16, source="none")
LEVELS = {"package": 2, "node": 4}
SEQUENCES, STEPS, SAVED_AT = 2, 3, 1
Job = tuple[int, int, str, str]  # ranks, of these along context, scheme, attention
SAVED: Job = (4, 2, "hier3-exact", "ring")
RESUMED: list[Job] = [
    (4, 4, "hpz", "heads"), (4, 2, "zero1", "gather"), (2, 2, "ddp", "ring"), (2, 1, "zero3", "ring"),
    (1, 1, "zero3", "ring"),
]  # fmt: skip


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(64, (SEQUENCES, 17), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:]


def alone() -> list[float]:
    model = GPT(MODEL, seed=3)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(STEPS):
        loss = model(*batch(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def trained(job: Job, folder: Path, begins: int) -> list[float]:
    """Losses of the steps; before the first one what the folder has is loaded, at SAVED_AT it is saved."""
    _, context, scheme, attention = job
    topology = lowband.Topology(LEVELS, lowband.Axes(context=context, context_attention=attention))
    data = topology.along("data")
    with torch.device("meta"):
        model = GPT(MODEL)
    on_job(model, CONFIG.scheme(scheme), topology, compute_dtype=torch.float32, seed=3, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    checkpointer, losses = lowband.Checkpointer(folder), []
    if begins:
        assert checkpointer.load(checkpointer.latest(), model, optimizer) == {"next_step": begins}
    replicas = len(data.ranks) // context
    own = slice(*(SEQUENCES // replicas * (data.place // context + more) for more in (0, 1)))
    for step in range(begins, STEPS):
        if step == SAVED_AT and not begins:
            checkpointer.save(step, model, optimizer, {"next_step": step})
            checkpointer.wait()
        inputs, targets = batch(step)
        loss = model(inputs[own], targets[own])
        loss.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / len(data.ranks))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_another_division_of_tokens_goes_on_as_one_process(tmp_path: Path) -> None:
    [expected] = on_ranks(1, alone)
    for losses in on_ranks(SAVED[0], trained, SAVED, tmp_path, 0):
        assert losses == pytest.approx(expected, rel=1e-5)
    for job in RESUMED:
        for losses in on_ranks(job[0], trained, job, tmp_path, SAVED_AT):
            assert losses == pytest.approx(expected[SAVED_AT:], rel=1e-5), job


def test_an_interrupted_run_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    goes_on_with_the_same_bits(tmp_path / "run", ranks=4, context=2, scheme=CONFIG.scheme("zero3"))
