"""A batch of many lengths on 4 and 8 ranks, by a plan, one degree, padded: losses and bytes."""

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from lowband.errors import UserError
from lowband.model.gpt import GPT
from lowband.predict.search import lengths_tasks
from lowband.predict.search.lengths_step import Costs
from lowband.run import by_length
from lowband.run.on_ranks import on_ranks
from lowband.spec.model import ModelSpec

MODEL = ModelSpec(
    name="lengths", layers=2, hidden=32, heads=4, vocab=64, seq_len=64, positions="rotary", source="test"
)
BATCH, ROOM, SIZES = [61, 17, 8, 5, 5, 1], 16.0, {"package": 2, "node": 4}
WAYS = {2: "heads", 4: "package=heads,node=ring", 8: "package=heads,node=ring,world=ring"}


def _costs() -> Costs:
    """Seconds that grow with the square of the length, and exchanges that cost more on more ranks."""
    seconds = {
        degree: lambda s, d=degree: (s.astype(float) ** 2 + 20 * s) / d + 3 * s * (d > 1) + 40 * (d > 4)
        for degree in (1, 2, 4, 8)
    }
    return Costs(seconds, ROOM, 1.0, lambda _length, degree: WAYS.get(degree, ""))


@cache
def _given(ranks: int) -> dict[str, list[lengths_tasks.Task]]:
    costs = _costs()
    found = lengths_tasks.plans(BATCH, ranks, costs, [degree for degree in (1, 2, 4, 8) if degree <= ranks])
    return {name: lengths_tasks.tasks(BATCH, plan, costs, name == "padded") for name, plan in found.items()}


def _alone() -> list[float]:
    """Losses of one process that sees the whole batch."""
    model = GPT(MODEL, seed=1)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=by_length.LEARNING_RATE), []
    for _ in range(3):
        total = torch.zeros(())
        for number, length in enumerate(BATCH):
            inputs, targets = by_length.sequence(MODEL.vocab, number, length, length)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="sum") / sum(
                BATCH
            )
            loss.backward()
            total += loss.detach()
        losses.append(float(total))
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.fixture(scope="module", params=[4, pytest.param(8, marks=pytest.mark.wide)])
def trained(request: pytest.FixtureRequest) -> list[dict[str, list[Any]]]:
    return on_ranks(request.param, _trained, request.param)


def _trained(ranks: int) -> dict[str, list[Any]]:
    """Two steps; three by the plan: the third sees whether the second had gradients of the first."""
    found = {}
    for name, given in _given(ranks).items():
        steps = 3 if name == "plan" else 2
        found |= by_length.train(MODEL, BATCH, {name: given}, SIZES, "fp32", steps)
    return found


@pytest.mark.parametrize("ranks", [4, 8])
def test_each_way_computes_every_token_of_the_batch_once(ranks: int) -> None:
    for name, given in _given(ranks).items():
        assert sorted(task.sequence for task in given) == [*range(len(BATCH))]
        for task in given:
            own = max(BATCH) if name == "padded" else BATCH[task.sequence]
            assert task.tokens == max(own, task.degree)
        for task in given:
            assert task.first % task.degree == 0
            assert task.tokens <= ROOM * task.degree
    degrees = {name: {task.degree for task in given} for name, given in _given(ranks).items()}
    assert len(degrees["plan"]) > 1
    assert len(degrees["one degree"]) == len(degrees["padded"]) == 1


def test_losses_are_those_of_one_process(trained: list[dict[str, list[Any]]]) -> None:
    [expected] = on_ranks(1, _alone)
    for of_rank in trained:
        for name, steps in of_rank.items():
            assert [step.loss for step in steps] == pytest.approx(expected[: len(steps)], rel=1e-5), name
    assert expected[2] < expected[0]


def test_bytes_are_the_closed_form(trained: list[dict[str, list[Any]]]) -> None:
    for name, given in _given(len(trained)).items():
        expected = lengths_tasks.sent_bytes(MODEL, given, SIZES, "fp32")
        for step in range(len(trained[0][name])):
            found: dict[tuple[str, str], float] = {}
            for of_rank in trained:
                for key, sent in of_rank[name][step].sent.items():
                    found[key] = found.get(key, 0) + sent
            assert {key: sent for key, sent in found.items() if sent} == dict(expected), name
    by_way = {
        name: sum(lengths_tasks.sent_bytes(MODEL, given, SIZES, "fp32").values())
        for name, given in _given(len(trained)).items()
    }
    assert by_way["one degree"] < by_way["padded"]


def test_a_sequence_without_room_is_refused() -> None:
    with pytest.raises(UserError, match="fits nowhere"):
        lengths_tasks.plans([1000], 8, _costs(), [1, 2, 4, 8])
