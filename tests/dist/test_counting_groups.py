"""Optimizers that count their steps in the param groups, as those of pytorch-optimizer do: on disk, saved."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowband
from lowband.engine.units.known_optimizers import BY_ELEMENT
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme
from lowband.spec.tiers import DEVICE, DISK, at
from tests.checkout import CONFIG
from tests.refused import refusal

STEPS = 6  # rectified ones take their first such step in the sixth
FEW = ["AdaBelief", "RAdam", "ScheduleFreeSGD", "VSGD"]
# What a checkpoint cannot have: a state of no parameter; states that are dicts.
UNSAVED = {"MADGRAD", "AggMo"}


def made(kind: str, tier: str, folder: str | None) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Two units, whose parameters are in two groups that cross them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    scheme = Scheme(name="placed", weights="self", grads="world", optim=at("world", tier))
    lowband.shard(model, scheme, lowband.Topology({}), nn.Linear, torch.float32, disk=folder)
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == is_in] for is_in in (True, False))
    groups = [{"params": matrices}, {"params": vectors, "lr": 1e-4}]
    return model, getattr(pytest.importorskip("pytorch_optimizer"), kind)(groups)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        (model(x) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    options = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
    return [value.tolist() for value in lowband.full_state_dict(model).values()], options


def in_tier(kind: str, tier: str, folder: str | None) -> tuple[Any, Any]:
    model, optimizer = made(kind, tier, folder)
    train(model, optimizer, range(STEPS))
    return state_of(model, optimizer)


def in_tiers(folder: str, kinds: list[str]) -> list[str]:
    """Those that differ on disk."""
    pairs = ((kind, in_tier(kind, DEVICE, None), in_tier(kind, DISK, f"{folder}/{kind}")) for kind in kinds)
    return [kind for kind, here, there in pairs if here != there]


@pytest.mark.parametrize("kinds", [FEW, pytest.param(None, marks=pytest.mark.wide)])
def test_on_disk_a_step_counts_once_for_all_units(tmp_path: Path, kinds: list[str] | None) -> None:
    every = sorted(BY_ELEMENT["pytorch_optimizer"] - {"MADGRAD"})
    assert on_ranks(1, in_tiers, str(tmp_path), kinds or every) == [[]]


def resumed(folder: str, kinds: list[str]) -> list[str]:
    """Those that go on otherwise from a checkpoint, in an optimizer that has not stepped."""
    found = []
    for kind in kinds:
        model, optimizer = made(kind, DEVICE, None)
        train(model, optimizer, range(3))
        checkpointer = lowband.Checkpointer(f"{folder}/{kind}")
        checkpointer.save(3, model, optimizer)
        loaded = made(kind, DEVICE, None)
        assert checkpointer.load_newest(*loaded) is not None
        for each in ((model, optimizer), loaded):
            train(*each, range(3, STEPS))
        if state_of(*loaded) != state_of(model, optimizer):
            found.append(kind)
    return found


@pytest.mark.parametrize("kinds", [FEW, pytest.param(None, marks=pytest.mark.wide)])
def test_a_new_optimizer_goes_on_from_a_checkpoint(tmp_path: Path, kinds: list[str] | None) -> None:
    every = sorted(BY_ELEMENT["pytorch_optimizer"] - UNSAVED)
    assert on_ranks(1, resumed, str(tmp_path), kinds or every) == [[]]


def counted_elsewhere(folder: str) -> list[str]:
    """What is said of a count that is of no group and no parameter: on disk, in a checkpoint."""
    found = []
    model, optimizer = made("MADGRAD", DEVICE, None)
    train(model, optimizer, range(1))
    on_disk = made("MADGRAD", DISK, f"{folder}/disk")
    for act in (
        lambda: lowband.Checkpointer(folder).save(1, model, optimizer),
        lambda: train(*on_disk, range(1)),
    ):
        found.append(refusal(act))
    return found


def test_a_count_of_no_parameter_is_refused(tmp_path: Path) -> None:
    allowed = "(allowed: states of parameters)"
    assert on_ranks(1, counted_elsewhere, str(tmp_path)) == [
        [
            f"optimizer: its state 'k' is of no parameter {allowed}",
            "MADGRAD of states on disk: its state 'k' is of no parameter, and changes with each unit "
            f"{allowed}",
        ]
    ]


MIXING = ("AdEMAMix", "cautious"), ("ADOPT", "stable_adamw"), ("AdaBelief", "adanorm")


def _mixing() -> list[str]:
    optimizers = pytest.importorskip("pytorch_optimizer")
    topology, said = lowband.Topology({}), []
    for kind, option in MIXING:
        model = lowband.shard(
            nn.Sequential(nn.Linear(8, 8)), CONFIG.scheme("zero3"), topology, nn.Linear, torch.float32
        )
        said.append(refusal(getattr(optimizers, kind), model.parameters(), **{option: True}))
        optimizer = getattr(optimizers, kind)(model.parameters())
        optimizer.param_groups[0][option] = True
        model(torch.ones(1, 8)).sum().backward()
        assert refusal(optimizer.step) == said[-1]
    return said


def test_options_that_mix_elements_are_refused() -> None:
    assert on_ranks(1, _mixing) == [
        [
            f"{kind}: '{option}' needs whole parameters, and each rank holds flat pieces of them (allowed: "
            f"without '{option}', or lowband.Matrices, which gives it whole parameters)"
            for kind, option in (
                ("AdEMAMix", "cautious"),
                ("ADOPT", "stable_adamw"),
                ("AdaBelief", "adanorm"),
            )
        ]
    ]
