"""Modules built on the meta device: values of real ones, one parameter in memory at a time."""

from collections.abc import Callable

import pytest
import torch
from named import INNER, SCHEMES, Topologies, levels_of
from test_parity import SPEC
from torch import nn

import lowband
from lowband.cost.memory import start_bytes
from lowband.engine.passes.engine import engine_of
from lowband.engine.passes.whole import sha256, state_digests
from lowband.engine.units.initial import fill
from lowband.model.gpt import GPT, Block
from lowband.run.on_ranks import on_ranks
from lowband.trainers.trainer import fingerprint_of
from tests.checkout import CONFIG
from tests.refused import refusal

SEED = 7


def state_of_deferred(schemes: list[str]):
    """Per scheme: the whole state, and the peak bytes of the start, counted and in closed form."""
    topologies, found = Topologies(), {}
    for name in schemes:
        scheme, topology = CONFIG.scheme(name), topologies.of(name)
        with torch.device("meta"):
            model = GPT(SPEC)
        before = torch.get_rng_state()
        lowband.shard(model, scheme, topology, Block, torch.float32, init=model.init, seed=SEED)
        assert torch.equal(torch.get_rng_state(), before)
        should = start_bytes(SPEC.unit_shapes(), scheme, topology.levels, "fp32", topology.rank)
        held = engine_of(model).meter.peak["start"]
        found[name] = lowband.full_state_dict(model), held, should
    return found


@pytest.mark.parametrize("ranks", [1, 2, 4, pytest.param(8, marks=pytest.mark.wide)])
def test_the_values_are_those_of_a_real_module(ranks: int) -> None:
    expected = GPT(SPEC, seed=SEED).state_dict()
    by_rank = on_ranks(ranks, state_of_deferred, SCHEMES)
    for name in SCHEMES:
        state = by_rank[0][name][0]
        assert list(state) == list(expected)
        assert all(torch.equal(state[key], expected[key]) for key in expected), name
        assert [found[name][1] for found in by_rank] == [found[name][2] for found in by_rank], name
        fullest = start_bytes(SPEC.unit_shapes(), CONFIG.scheme(name), levels(ranks, name), "fp32")
        assert max(found[name][1] for found in by_rank) == fullest, name


def levels(ranks: int, scheme: str):
    from lowband.spec.mesh import Levels

    return Levels.fit(levels_of(scheme), ranks)


class Odd(nn.Module):
    """Tied and frozen parameters, buffers, a parameter that is real already, bf16 values."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 5)
        self.tied = nn.Linear(5, 7)
        self.tied.weight = self.first.weight
        self.second.weight.requires_grad_(False)
        self.low = nn.Parameter(torch.empty(3, dtype=torch.bfloat16))
        self.given = nn.Parameter(torch.arange(4.0, device="cpu"))
        self.register_buffer("steps", torch.zeros(2, dtype=torch.long))
        self.register_buffer("scale", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x) + self.tied(x)) * self.scale.sum()
        return y.sum() + self.low.sum() + self.given.sum()


def odd_init(name: str, tensor: torch.Tensor) -> None:
    if tensor.is_floating_point():
        nn.init.normal_(tensor)
    else:
        tensor.fill_(3)


def run_odd() -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = Odd()
    lowband.shard(model, "zero3", lowband.Topology({}), nn.Linear, torch.float32, init=odd_init, seed=SEED)
    assert model.scale.device.type == "cpu"
    model(torch.ones(1, 5)).backward()
    return {**lowband.full_state_dict(model), "scale": model.scale}


def test_a_module_of_many_kinds() -> None:
    expected = Odd()
    named = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    for name, tensor in named.items():
        if name != "given":
            fill(name, tensor.detach(), odd_init, SEED)
    for state in on_ranks(2, run_odd)[:1]:
        assert state["steps"].tolist() == [3, 3]
        assert state["tied.weight"].equal(state["first.weight"])
        assert all(
            torch.equal(state[name], tensor.detach().float())
            for name, tensor in named.items()
            if name != "steps"
        )


def refused(init: Callable[[str, torch.Tensor], None] | None) -> str:
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    return refusal(lambda: lowband.shard(model, "zero3", lowband.Topology({}), nn.Linear, init=init))


def refused_with_values() -> str:
    model = nn.Linear(3, 3)
    return refusal(lambda: lowband.shard(model, "zero3", lowband.Topology({}), nn.Linear, device="cuda:1"))


def test_another_device_than_that_of_the_values_is_refused() -> None:
    [said] = on_ranks(1, refused_with_values)
    assert (
        "device is 'cuda:1' (allowed: cpu, where the module has values, or a module on the meta device"
        in said
    )


def only_the_bias(name: str, tensor: torch.Tensor) -> None:
    if name == "bias":
        tensor.zero_()


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (None, "'weight' is on the meta device and has no values"),
        (only_the_bias, "init left values of 'weight' unset"),
    ],
)
def test_values_that_are_missing_are_refused(init, message: str) -> None:
    assert message in on_ranks(1, refused, init)[0]
    # On four ranks the last one holds the bias alone, and does not ask for the weight.
    assert all(message in found for found in on_ranks(4, refused, init))


def fingerprints() -> tuple[str, str]:
    """By units, and of the whole state."""
    model = lowband.shard(GPT(SPEC, seed=SEED), "hier3", lowband.Topology(INNER), Block, torch.float32)
    by_units = fingerprint_of(state_digests(model, engine_of(model)))
    state = lowband.full_state_dict(model)
    return by_units, fingerprint_of({name: sha256(value) for name, value in state.items()})


@pytest.mark.parametrize("ranks", [1, 4])
def test_the_fingerprint_by_units_is_that_of_the_whole(ranks: int) -> None:
    by_rank = on_ranks(ranks, fingerprints)
    assert {by_units for by_units, _ in by_rank} == {by_rank[0][1]}
