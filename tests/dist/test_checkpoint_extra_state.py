"""What modules add to their state by `get_extra_state` is saved and loaded, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks
from lowband.spec.config import Config
from tests.checkout import ROOT
from tests.refused import refusal

CONFIG = Config(ROOT)


class Noting(nn.Linear):
    """Keeps a scale for each call; its state grows."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.noted: dict[str, Any] = {"scales": [], "last": torch.zeros(0)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.noted["scales"].append(float(x.detach().abs().max()))
        self.noted["last"] = x.detach().clone()
        return super().forward(x)

    def get_extra_state(self) -> dict[str, Any]:
        return self.noted

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.noted = state


class Handle:
    """What only code could bring back."""


def prepared() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), Noting())
    lowband.shard(model, CONFIG.scheme("zero3"), lowband.Topology({}), nn.Linear, torch.float32)
    return model, torch.optim.AdamW(model.parameters())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        model(torch.full((2, 4), 1.0 + step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def saved(folder: str) -> dict[str, Any]:
    model, optimizer = prepared()
    train(model, optimizer, 3)
    checkpointer = lowband.Checkpointer(folder)
    checkpointer.save(3, model, optimizer)
    noted = {"scales": [*model[1].noted["scales"]], "last": model[1].noted["last"]}
    train(model, optimizer, 1)  # in place, behind the copy
    checkpointer.wait()
    return noted


def loaded(folder: str, steps_before: int) -> dict[str, Any]:
    model, optimizer = prepared()
    train(model, optimizer, steps_before)
    lowband.Checkpointer(folder).load_newest(model, optimizer)
    return model[1].noted


@pytest.mark.parametrize(("ranks", "steps_before"), [(1, 0), (2, 5)])
def test_it_comes_back(tmp_path: Path, ranks: int, steps_before: int) -> None:
    before = on_ranks(2, saved, str(tmp_path))[0]
    for noted in on_ranks(ranks, loaded, str(tmp_path), steps_before):
        assert noted["scales"] == before["scales"] and torch.equal(noted["last"], before["last"])


def saved_of_other_lengths(folder: str) -> int:
    model, optimizer = prepared()
    rank = torch.distributed.get_rank()
    model[1].noted["seen"] = "x" * 1000 * (1 + rank)
    checkpointer = lowband.Checkpointer(folder)
    checkpointer.save(0, model, optimizer)
    checkpointer.wait()
    model, optimizer = prepared()
    checkpointer.load_newest(model, optimizer)
    return len(model[1].noted["seen"])


def test_ranks_may_have_noted_more_than_the_first_whose_is_saved(tmp_path: Path) -> None:
    assert on_ranks(2, saved_of_other_lengths, str(tmp_path)) == [1000, 1000]


class Scaled(nn.Module):
    """One of several layers that share a module with a state of its own."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.layer, self.shared = nn.Linear(4, 4), shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shared(self.layer(x))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by

    def get_extra_state(self) -> float:
        return self.by

    def set_extra_state(self, by: float) -> None:
        self.by = by


def shared_over(stages: int) -> tuple[nn.Module, Scale, torch.optim.Optimizer]:
    shared, topology = Scale(), lowband.Topology({}, lowband.Axes(pipeline=stages))
    layers = nn.ModuleList([Scaled(shared), Scaled(shared)])
    dtype = torch.float32
    if stages == 1:
        model: nn.Module = lowband.shard(layers, "zero3", topology, Scaled, dtype)
    else:
        model = lowband.Pipeline(layers, lambda y, _: y.sum(), "zero3", topology, 1, compute_dtype=dtype)
    return model, shared, torch.optim.AdamW(model.parameters())


def shared_loaded(stages: tuple[int, int], folder: str) -> float:
    model, shared, optimizer = shared_over(stages[0])
    shared.by, checkpointer = 3.0, lowband.Checkpointer(folder)
    checkpointer.save(0, model, optimizer)
    checkpointer.wait()
    model, shared, optimizer = shared_over(stages[1])
    checkpointer.load_newest(model, optimizer)
    return shared.by


@pytest.mark.parametrize("stages", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_that_of_a_module_which_stages_share_comes_back(tmp_path: Path, stages: tuple[int, int]) -> None:
    assert on_ranks(2, shared_loaded, stages, str(tmp_path)) == [3.0, 3.0]


def what_needs_code(folder: str) -> str:
    model, optimizer = prepared()
    model[1].noted["handle"] = Handle()
    return refusal(lambda: lowband.Checkpointer(folder).save(0, model, optimizer))


def test_what_needs_code_is_refused(tmp_path: Path) -> None:
    for said in on_ranks(2, what_needs_code, str(tmp_path)):
        assert said.startswith("module '1': its extra state, a dict, could only be read back by running code")
    assert not list(tmp_path.iterdir())


def where_it_is_missing(folder: str) -> str:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    lowband.shard(model, CONFIG.scheme("zero3"), lowband.Topology({}), nn.Linear, torch.float32)
    adamw = torch.optim.AdamW(model.parameters())
    return refusal(lowband.Checkpointer(folder).load_newest, model, adamw)


def test_modules_without_it_do_not_fit(tmp_path: Path) -> None:
    on_ranks(1, saved, str(tmp_path))
    assert "'extra.1' is only in the checkpoint" in on_ranks(1, where_it_is_missing, str(tmp_path))[0]
