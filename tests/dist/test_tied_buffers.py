"""Buffers of a module that stages on several ranks share: equal ones, and none that training changes."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import lowband
from lowband.errors import UserError
from lowband.run.on_ranks import on_ranks
from lowband.spec.axes import Axes

D = 8


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(D))
        self.register_buffer("table", torch.empty(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.table


def drawn(_: str, tensor: torch.Tensor) -> None:
    nn.init.normal_(tensor)


def loss_of(y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (y - target).square().mean()


def pipe_of(shared: nn.Module, init: Callable[[str, torch.Tensor], object] | None) -> lowband.Pipeline:
    """Both ranks along pipeline have it."""
    topology = lowband.Topology({}, Axes(pipeline=2))
    chain = [shared, nn.Linear(D, D, device=next(shared.parameters()).device), shared]
    return lowband.Pipeline(
        chain, loss_of, "zero3", topology, 1, compute_dtype=torch.float32, init=init, device="cpu"
    )


def from_meta() -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        shared = Scaled()
    return dict(pipe_of(shared, drawn).named_buffers())


def test_buffers_from_meta_are_equal_in_all_stages() -> None:
    first, last = on_ranks(2, from_meta)
    assert torch.equal(first["0.table"], last["2.table"])


def changing(kind: type[nn.Module]) -> str:
    pipe = pipe_of(kind(D), None)
    batch = [(torch.randn(4, D), torch.randn(4, D))]
    pipe.eval()
    pipe.step(batch)  # its buffers stay as they are
    pipe.train()
    with pytest.raises(UserError) as error:
        pipe.step(batch)
    return str(error.value)


class Assigning(nn.Module):
    """Has another buffer after each forward that trains."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.register_buffer("running_mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.running_mean = self.running_mean * 0.9 + x.detach().mean(0) * 0.1
        return x * self.weight - self.running_mean


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, Assigning])
def test_buffers_that_training_changes_are_refused(kind: type[nn.Module]) -> None:
    for said in on_ranks(2, changing, kind):
        assert "a forward changed the buffer '0.running_mean', of which several stages have copies" in said


class Masked(nn.Module):
    """Has values in a buffer that equal nothing, not themselves either."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))
        self.register_buffer("unset", torch.tensor([torch.nan, 0.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def with_nan() -> int:
    return len(pipe_of(Masked(), None).step([(torch.randn(4, D), torch.randn(4, D))]))


def test_a_buffer_with_nan_that_stays_as_it_is_is_no_change() -> None:
    assert on_ranks(2, with_nan) == [0, 1]
