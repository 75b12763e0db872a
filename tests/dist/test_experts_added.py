"""Tokens that are added to sequences, so that ranks along context have equally many, are no experts' load."""

import pickle

import pytest
import torch
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks
from lowband.spec.axes import Axes
from lowband.spec.routing import Routing
from tests.refused import answer

ROUTINGS = {
    "none": Routing(experts=4, top_k=1),
    "bias": Routing(experts=4, top_k=1, balance="bias"),
    "loss": Routing(experts=4, top_k=1, balance="loss"),
    "limit": Routing(experts=4, top_k=1, capacity=1.0),
}


class Model(nn.Module):
    def __init__(self, routing: Routing) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(11, 8), nn.Linear(8, 11)
        self.mlp = lowband.MixtureOfExperts(8, 6, routing)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.mlp(self.embed(tokens)))


def said(routing: str) -> tuple[str, str, str]:
    """Of lengths that two ranks divide; of others; of these without gradients."""
    topology = lowband.Topology({}, Axes(context=2))
    context, model = lowband.Context(topology), Model(ROUTINGS[routing])
    context.bind(model)
    lowband.shard(model, "zero3", topology, lambda _: False, torch.float32)

    def trained(length: int) -> str:
        return answer(model, context.split(torch.arange(length).view(1, -1) % 11))

    with torch.no_grad():
        evaluated = trained(9)
    return trained(8), trained(9), evaluated


def test_a_model_that_is_not_sharded_can_be_pickled() -> None:
    assert isinstance(pickle.loads(pickle.dumps(Model(ROUTINGS["bias"]))), Model)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_added_tokens_are_refused_where_they_would_count(routing: str) -> None:
    expected = "" if routing == "none" else "tokens that Context.split has added would count in the balance"
    for even, uneven, evaluated in on_ranks(2, said, routing):
        assert even == evaluated == ""
        assert expected in uneven and bool(uneven) == bool(expected)
