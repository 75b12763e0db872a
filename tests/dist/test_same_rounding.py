"""A backward computes with the weights that its forward had, rounded as they were."""

from collections.abc import Callable

import pytest
import torch
from modules import INNER, STEPS, sgd
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowband
from lowband.run.on_ranks import on_ranks
from lowband.spec.scheme import Scheme
from tests.checkout import CONFIG


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


class Inside(nn.Module):
    """Called without gradients, it makes its own."""

    def __init__(self) -> None:
        super().__init__()
        self.map = Mapped().map

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            return self.map(x)


def apart(call: Callable[[torch.Tensor], torch.Tensor]) -> float:
    """The largest difference between the weight that the forward had and that of its backward."""
    ones = torch.eye(24, requires_grad=True)
    got = call(ones)
    got.backward(torch.eye(24))
    assert ones.grad is not None
    return (got.detach().T - ones.grad).abs().max().item()


def differences_without_gradients_before() -> list[float]:
    """Of a unit that is called on its own after a forward without gradients, its module's and its own; of one
    that a module calls with gradients, itself without; of one on its own that is computed twice."""
    scheme = CONFIG.scheme("zeropp")
    kinds = lowband.Topology(INNER), is_linear
    two = nn.Sequential(Mapped().map, Mapped().map)
    model, inside = (
        lowband.shard(module, scheme, *kinds, compute_dtype=torch.float32) for module in (two, Inside())
    )
    optimizer, found = sgd(model.parameters()), [apart(model[0])]
    for call in (model, model[0]):
        optimizer.step()
        with torch.no_grad():
            call(torch.eye(24))
        found.append(apart(model[0]))
    with torch.no_grad():
        found.append(apart(inside))
    optimizer.step()
    found.append(apart(lambda x: checkpoint(model[0], x, use_reentrant=True)))
    return found


@pytest.mark.parametrize("ranks", [2, 8])
def test_a_forward_without_gradients_before_changes_nothing(ranks: int) -> None:
    for found in on_ranks(ranks, differences_without_gradients_before):
        assert found == [0.0] * 5


def first_and_written_again(frozen: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The weights of a first forward, and behind a write of the same values, as of a checkpoint."""
    scheme = Scheme(name="new", weights="node", grads="world", optim="world", update_gather="int8")
    module = Mapped()
    module.map.weight.requires_grad_(not frozen)
    model = lowband.shard(module, scheme, lowband.Topology(INNER), is_linear, compute_dtype=torch.float32)
    ones = torch.eye(24)
    first = model(ones).detach()
    with torch.no_grad():
        for shard in model.parameters():
            shard.add_(0)
    return first, model(ones).detach()


@pytest.mark.parametrize("frozen", [False, True])
def test_the_first_weights_are_rounded_as_new_ones_are(frozen: bool) -> None:
    """So a run that is resumed goes on with the weights it had, frozen ones included."""
    for first, again in on_ranks(8, first_and_written_again, frozen):
        assert torch.equal(first, again)
        assert not torch.equal(first.T, Mapped().map.weight)
