"""A GPT whose layers have experts on other ranks, under schemes, against one process."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from gpts import NAMES, Axes, Case, assert_trains_as_one_process, made, params
from near import assert_near
from started import goes_on_with_the_same_bits, runs

import lowband
from lowband.cost.contents import step_bytes
from lowband.errors import UserError
from lowband.run.on_ranks import on_ranks
from lowband.spec.model import ModelSpec
from lowband.spec.records import by_row
from lowband.spec.run import RunSpec
from tests.checkout import CONFIG

MIXED = ModelSpec(
    name="mixed", layers=2, hidden=32, heads=4, vocab=64, seq_len=16, source="none", experts=8, top_k=3,
    expert_hidden=40, shared_experts=1,
)  # fmt: skip
SWITCH = MIXED.model_copy(update={"top_k": 1, "shared_experts": 0, "expert_hidden": None})
SKEWED = MIXED.model_copy(update={"balance": "none", "top_k": 2})
TOKENS = 16
TWO = {"package": 2, "node": 4}


CASES: list[Case] = [
    (1, MIXED, {}, {}, "ddp", "depth", "none"),
    (2, MIXED, {}, {}, "zero3", "depth", "full"),  # experts as other parameters
    (2, SWITCH, {}, {"expert": 2, "route": "flat"}, "zero1", "depth", "none"),
    (2, MIXED, {}, {"expert": 2, "route_parts": 3}, "zero3", "depth", "full"),
    (4, MIXED, TWO, {"expert": 4}, "hier3-exact", "depth", "full"),
    (4, MIXED, {"node": 2}, {"expert": 2, "route": "hops"}, "zero3", "breadth", "none"),
    (4, MIXED, {}, {"expert": 2, "tensor": 2, "sequence_parallel": True}, "zero2", "depth", "full"),
    (4, SWITCH, {}, {"expert": 4, "context": 2}, "ddp", "depth", "none"),
    (4, SKEWED, {"node": 2}, {"expert": 4, "copies": 3}, "zero3", "depth", "full"),
    (4, SKEWED, {}, {"expert": 2, "copies": 2, "route": "flat"}, "zero1", "depth", "none"),
    (8, SKEWED, TWO, {"expert": 8, "copies": 4, "route": "hops"}, "hpz", "breadth", "none"),
    (8, MIXED, TWO, {"expert": 8, "route": "hops"}, "zero3", "breadth", "full"),
    (8, MIXED, TWO, {"expert": 4}, "hpz", "depth", "none"),
    (8, MIXED, TWO, {"expert": 8, "route": "hops", "route_parts": 2}, "hpz", "breadth", "none"),
    (8, SWITCH, TWO, {"expert": 4, "tensor": 2, "route": "flat", "route_parts": 2}, "ddp", "depth", "none"),
    (8, SWITCH, TWO, {"expert": 2, "tensor": 2, "context": 2}, "hier3-exact", "depth", "none"),
]


@pytest.mark.parametrize(NAMES, params(CASES, wide=(1, 7, 9)))
def test_trains_as_one_process(
    ranks: int, spec: ModelSpec, inner: dict[str, int], axes: Axes, scheme: str, order: str, recompute: str
) -> None:
    """Losses, norms, weights; and biases, which know every token of a step once."""
    case = ranks, spec, inner, axes, scheme, order, recompute
    weights = assert_trains_as_one_process(*case, rel=5e-6, atol=3e-6)
    assert spec.balance == "none" or all(
        weights[name].abs().max() > 0 for name in weights if name.endswith("router.bias")
    )


def _saved(folder: Path, axes: Axes, scheme: str, steps: int) -> dict[str, torch.Tensor]:
    """Train with momentum from the folder's checkpoint, if there is one, and leave another."""
    topology = lowband.Topology(TWO, lowband.Axes(**axes))
    model = made(MIXED, topology, scheme)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    checkpointer = lowband.Checkpointer(folder)
    latest = checkpointer.latest()
    first = 0 if latest is None else checkpointer.load(latest, model, optimizer)["next"]
    generator = torch.Generator().manual_seed(5)
    batches = torch.randint(64, (4, 8, TOKENS + 1), generator=generator)
    ranks, place = len(topology.along("data").ranks), topology.along("data").place
    for tokens in batches[first : first + steps]:
        mine = tokens.view(ranks, -1, TOKENS + 1)[place]
        model(mine[:, :-1], mine[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        lowband.balance_experts(model)
    checkpointer.save(first + steps, model, optimizer, {"next": first + steps})
    checkpointer.wait()
    return lowband.full_state_dict(model)


def test_a_checkpoint_is_resumed_under_another_expert_degree(tmp_path: Path) -> None:
    [expected] = on_ranks(1, _saved, tmp_path / "whole", {}, "ddp", 4)
    on_ranks(4, _saved, tmp_path / "parts", {"expert": 4}, "zero3", 1)
    on_ranks(8, _saved, tmp_path / "parts", {"expert": 2, "tensor": 2}, "hier3-exact", 1)
    on_ranks(1, _saved, tmp_path / "parts", {}, "zero1", 1)
    state = on_ranks(2, _saved, tmp_path / "parts", {"expert": 2, "route": "flat"}, "zero1", 1)[0]
    assert_near(state, expected, rtol=2e-5, atol=5e-6)


# ---- runs

RUN = CONFIG.model("gpt-200k").model_copy(update={"experts": 4})
UNBALANCED = RUN.model_copy(update={"balance": "none"})
REFUSED = [
    ({"expert": 3}, "4 ranks along data are no multiple of expert 3 (allowed: multiples of 3 ranks)"),
    ({"expert": 2}, "no experts of model 'gpt-200k' cannot be divided"),
    ({"expert": 4, "model": RUN.model_copy(update={"experts": 6})}, "6 experts of model 'gpt-200k' cannot"),
    ({"expert": 2, "model": RUN, "device": "fake"}, "tokens choose their experts"),
    ({"model": RUN, "engine": "fsdp2"}, "its models have no experts"),
    (
        {"expert": 2, "model": RUN, "scheme": CONFIG.scheme("local-sgd"), "steps": 16},
        "would sum experts' load",
    ),
    ({"route": "twice"}, "route"),
    ({"model": RUN, "copies": 1}, "copies 1 of 4 experts of model 'gpt-200k' (allowed: 0; with expert 2"),
    ({"model": RUN, "expert": 2, "copies": 5}, "copies 5 of 4 experts"),
    ({"model": RUN, "route_parts": 2}, "route_parts 2 beside expert 1 (allowed: 1; with expert 2 or more"),
    ({"model": RUN, "expert": 2, "route_parts": 2, "copies": 1}, "route_parts 2 beside copies 1"),
    (
        {"model": RUN, "expert": 2, "route_parts": 2, "scheme": CONFIG.scheme("zero3")},
        "experts: route_parts 2 under scheme 'zero3', whose weights each part would gather (allowed: 1, w",
    ),
]


@pytest.mark.parametrize(("changes", "line"), REFUSED)
def test_runs_that_cannot_be_are_refused(changes: dict[str, Any], line: str) -> None:
    [smoke] = [spec for spec in CONFIG.runs(["smoke"]) if "hier3-exact-n0004" in spec.run_id]
    with pytest.raises(UserError, match=re.escape(line)):
        RunSpec.parse({**smoke.model_dump(), **changes}, "test")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"top_k": 5}, "top_k (5) is more than experts (4)"),
        ({"experts": None, "top_k": 1}, "are for layers with experts"),
        ({"experts": 0}, "experts"),
    ],
)
def test_models_that_cannot_be_are_refused(changes: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=re.escape(line)):
        ModelSpec.parse({**RUN.model_dump(), **changes}, "model")


def test_a_model_without_experts_has_the_specification_that_it_had() -> None:
    model = CONFIG.model("gpt-200k")
    assert not {"experts", "top_k", "shared_experts", "balance"} & set(model.model_dump())


def test_runs_have_the_losses_of_one_another_and_bytes_near_the_closed_form(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Units' bytes exactly; tokens' about: the form has every expert equally likely."""
    of_axes = {
        "data": {"ranks": 2, "micro_batch": 4},
        "flat": {"ranks": 4, "micro_batch": 2, "expert": 4, "route": "flat"},
        "merged": {
            "ranks": 4,
            "micro_batch": 1,
            "accumulation": 2,
            "expert": 4,
            "recompute": "full",
            "route_parts": 2,
        },
        "copies": {"ranks": 4, "micro_batch": 2, "expert": 4, "copies": 1, "model": UNBALANCED},
        "stages": {
            "ranks": 4,
            "micro_batch": 2,
            "accumulation": 2,
            "expert": 2,
            "pipeline": 2,
            "layers": (2, 1),
        },
    }
    if not request.config.getoption("--wide"):
        of_axes = {name: of_axes[name] for name in ("data", "merged", "stages")}
    found, losses = runs(tmp_path, of_axes, model=RUN)
    for name in of_axes.keys() - {"data"}:
        rel = 0.05 if name == "copies" else 1e-5  # it has no balance, so it trains another model
        assert losses[name] == pytest.approx(losses["data"], rel=rel)
        check_bytes(RunSpec.read_json(found[name].spec), [*found[name].read_steps()][-1].sent)


@pytest.mark.parametrize("stages", [pytest.param(2, marks=pytest.mark.wide), 1])
def test_an_interrupted_run_with_copies_goes_on_with_the_same_bits(tmp_path: Path, stages: int) -> None:
    """Merged, a copy sums its tokens in another order: so the loads that choose copies are saved, too."""
    changes = {
        "ranks": 4 * stages, "expert": 4, "copies": 2, "micro_batch": 2, "model": UNBALANCED,
        "scheme": CONFIG.scheme("zero3"),
    }  # fmt: skip
    if stages > 1:
        changes |= {"pipeline": 2, "layers": (2, 1), "accumulation": 2}
    goes_on_with_the_same_bits(tmp_path / "run", **changes)


def check_bytes(spec: RunSpec, sent: Any) -> None:
    counted = by_row(sent)
    closed: Mapping[tuple[str, str, str], float] = step_bytes(spec)
    assert counted.keys() == closed.keys()
    for key, count in counted.items():
        is_drawn = key[1].startswith("route") and key[1] != "route_counts"
        if spec.copies and is_drawn:  # fewer: tokens of copies stay
            assert count < 1.4 * closed[key], key
        else:
            assert count == pytest.approx(closed[key], rel=0.4 if is_drawn else 0), key
