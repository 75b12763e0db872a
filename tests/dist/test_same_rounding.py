"""A backward computes with the weights that its forward had, rounded as they were."""

import pytest
import torch
from modules import INNER, STEPS, sgd
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme


class Mapped(nn.Module):
    """A linear map in a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.map = nn.Linear(24, 24, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.map(x)


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear)


def weights_used(backward_gather: str) -> tuple[bool, list[bool]]:
    """Whether the first forward's weights are rounded; whether each step's backward used its forward's."""
    scheme = Scheme(
        name="zeropp", weights="world", secondary="node", grads="world", optim="world",
        forward_gather="int8", backward_gather=backward_gather,
    )  # fmt: skip
    model = lowband.shard(Mapped(), scheme, lowband.Topology(INNER), is_linear, compute_dtype=torch.float32)
    optimizer, used = sgd(model.parameters()), []
    for _ in range(STEPS):
        ones = torch.eye(24, requires_grad=True)
        forward = model(ones).detach()  # and the graph goes: a forward without a backward
        got = model(ones)
        got.backward(torch.eye(24))
        optimizer.step()
        optimizer.zero_grad()
        assert ones.grad is not None
        assert torch.equal(forward, got)
        used.append((got.T.detach(), torch.equal(ones.grad, got.T)))
    return not torch.equal(used[0][0], Mapped().map.weight), [is_same for _, is_same in used]


@pytest.mark.parametrize(
    ("ranks", "backward_gather"),
    [(1, "native"), (2, "native"), (4, "native"), (8, "native"), (2, "int8"), (4, "int8")],
)
def test_the_backward_has_the_forwards_weights(ranks: int, backward_gather: str) -> None:
    """In one node, too, where the secondary's group has as many ranks as the weights'.

    On two nodes int8 in the backward would round once more what the secondary shard has.
    """
    for is_rounded, are_same in on_ranks(ranks, weights_used, backward_gather):
        assert is_rounded == (ranks > 1)
        assert are_same == [True] * STEPS
