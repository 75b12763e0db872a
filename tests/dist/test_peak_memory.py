"""Peak memory of a GPU is that of training, not of building the model."""

from pathlib import Path

import pytest
import torch

from lowband.model.data import read_corpus
from lowband.run import clock, over_ranks
from lowband.run import training_loop as loop
from lowband.run.on_ranks import on_ranks
from lowband.spec.run_folder import RunFolder
from lowband.trainers.trainer import Trainer
from tests.checkout import CONFIG


def calls_of_a_run(folder: Path) -> list[str]:
    """What happens to memory, in order, in a run of one rank."""
    calls: list[str] = []
    prepare, step = loop.prepare, Trainer.step
    loop.prepare = lambda *arguments: (calls.append("build"), prepare(*arguments))[1]
    loop.reset_peak_memory = lambda device: calls.append("reset")
    Trainer.step = lambda self, norm: (calls.append("step"), step(self, norm))[1]
    over_ranks.peak_memory_bytes = lambda device: (calls.append("read"), 1)[1]
    over_ranks.peak_reserved_bytes = lambda device: 7
    spec = next(spec for spec in CONFIG.runs(["smoke"]) if spec.ranks == 1)
    outcome = loop.train_rank(0, spec, read_corpus(spec.text), torch.device("cpu"), RunFolder(folder), False)
    assert outcome.peak_reserved_bytes_max == 7
    return calls


def test_the_peak_starts_with_training(tmp_path: Path) -> None:
    [calls] = on_ranks(1, calls_of_a_run, tmp_path)
    assert calls == ["build", "reset", *["step"] * 6, "read"]


def test_a_gpus_peak_is_reset_when_nothing_runs_or_is_cached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_device, name=name: calls.append(name))
    clock.reset_peak_memory(torch.device("cuda", 0))
    assert calls == ["synchronize", "empty_cache", "reset_peak_memory_stats"]
    clock.reset_peak_memory(torch.device("cpu"))
    assert len(calls) == 3
