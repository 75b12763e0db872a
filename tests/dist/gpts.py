"""GPTs that ranks along any axes train under schemes, and one process: for the tests that both agree."""

import contextlib
from collections.abc import Callable, Collection, Mapping
from typing import Any

import pytest
import torch
from near import assert_near

import lowband
from lowband.model.gpt import GPT
from lowband.model.gpt import on_ranks as on_job
from lowband.run.on_ranks import on_ranks
from lowband.spec.model import ModelSpec
from tests.checkout import CONFIG

STEPS, MICRO_BATCHES, CLIP, ROWS = 2, 2, 0.5, 2
Axes = dict[str, Any]
Found = tuple[list[float], dict[str, torch.Tensor]]
# Ranks along data -> inputs and targets, [steps, micro-batches, data ranks, sequences, tokens].
Batches = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
Case = tuple[int, ModelSpec, dict[str, int], Axes, str, str, str]
NAMES = ("ranks", "spec", "inner", "axes", "scheme", "order", "recompute")  # of a case


def params(cases: list[Case], wide: Collection[int] = ()) -> list[Any]:
    """Cases on more than four ranks, and those of these numbers, are for `make test-all`."""
    return [
        pytest.param(*case, marks=[pytest.mark.wide] if case[0] > 4 or i in wide else [])
        for i, case in enumerate(cases)
    ]


def batches(data_ranks: int, tokens: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randint(64, (STEPS, MICRO_BATCHES, data_ranks, ROWS, tokens + 1), generator=generator)
    return drawn[..., :-1], drawn[..., 1:]


def made(spec: ModelSpec, topology: lowband.Topology, scheme: str, **options: Any) -> GPT:
    """options: of the model"""
    with torch.device("meta"):
        model = GPT(spec, **options)
    on_job(model, CONFIG.scheme(scheme), topology, compute_dtype=torch.float32, seed=3, device="cpu")
    return model


def alone(spec: ModelSpec, batches: Batches, data_ranks: int) -> Found:
    """Losses and norms before clipping, and the final weights and biases of routers, of one process."""
    model = GPT(spec, seed=3)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=1.0), []
    for inputs, targets in zip(*batches(data_ranks), strict=True):
        for x, y in zip(inputs, targets, strict=True):
            loss = model(x.flatten(0, 1), y.flatten(0, 1)) / MICRO_BATCHES
            loss.backward()
            found.append(loss.item())
        found.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        if spec.experts is not None:
            lowband.balance_experts(model)
    return found, model.state_dict()


def trained(
    spec: ModelSpec, batches: Batches, inner: Mapping[str, int], axes: Axes, scheme: str, order: str,
    recompute: str = "none",
) -> Found:  # fmt: skip
    """The same on this rank of a job."""
    topology = lowband.Topology(inner, lowband.Axes(**axes))
    data = topology.along("data")
    place = data.place // topology.axes.context
    model = made(spec, topology, scheme, recompute=recompute)
    optimizer, found = torch.optim.SGD(model.parameters(), lr=1.0), []
    for inputs, targets in zip(*batches(len(data.ranks) // topology.axes.context), strict=True):
        micro_batches = [*zip(inputs[:, place], targets[:, place], strict=True)]

        def loss_of(micro_batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
            return model(*micro_batch) / MICRO_BATCHES  # type: ignore[no-any-return]

        if order == "breadth":
            losses = lowband.accumulate(model, micro_batches, loss_of)
        else:
            losses = []
            for i, micro_batch in enumerate(micro_batches):
                with lowband.no_sync(model) if i < MICRO_BATCHES - 1 else contextlib.nullcontext():
                    losses.append(loss_of(micro_batch))
                    losses[-1].backward()
        means = torch.stack([loss.detach() for loss in losses])
        torch.distributed.all_reduce(means)
        found += (means / torch.distributed.get_world_size()).tolist()
        found.append(float(lowband.clip_grad_norm_(model, CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        if spec.experts is not None:
            lowband.balance_experts(model)
            with torch.no_grad():
                model(*micro_batches[0])  # an evaluation, which is not counted
    return found, lowband.full_state_dict(model)


def assert_trains_as_one_process(
    ranks: int, spec: ModelSpec, inner: dict[str, int], axes: Axes, scheme: str, order: str, recompute: str,
    batches: Batches = batches, rel: float = 2e-6, atol: float = 2e-6,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Losses and norms on every rank, and the weights, which are returned. atol: of a weight"""
    data_ranks = ranks // int(axes.get("context", 1)) // int(axes.get("tensor", 1))
    [(expected, weights)] = on_ranks(1, alone, spec, batches, data_ranks)
    found = on_ranks(ranks, trained, spec, batches, inner, axes, scheme, order, recompute)
    for theirs, _ in found:
        assert theirs == found[0][0] == pytest.approx(expected, rel=rel)
    assert expected[MICRO_BATCHES] > CLIP
    assert_near(found[0][1], weights, rtol=1e-5, atol=atol)
    assert not any(other for _, other in found[1:])
    return weights
