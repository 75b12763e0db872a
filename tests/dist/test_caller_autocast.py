"""The caller's autocast around a whole step: of forwards, as around a loop with `backward` outside of it."""

import pytest
import torch
from staged import D, batches, chain, loss_of
from torch import nn

import lowband
from lowband.run.on_ranks import on_ranks
from lowband.spec.axes import Axes

MICRO_BATCHES = 3


class Scaled(torch.autograd.Function):
    """Its backward multiplies matrices, which an autocast around it would round."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x.detach())
        return x * 2

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        x_TD = x.flatten(0, 1)
        return grad @ (x_TD.T @ x_TD)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(torch.tanh(self.inner(x)).float())


def modules() -> list[nn.Module]:
    embed, head = chain(0)
    torch.manual_seed(4)
    return [embed, Layer(), Layer(), head]


def of_model(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return loss_of(model(x).float(), y) / MICRO_BATCHES


def plainly() -> list[torch.Tensor]:
    """Gradients of the usual loop, with `backward` outside of autocast."""
    model = nn.Sequential(*modules())
    for x, y in batches(0, 0, MICRO_BATCHES):
        with torch.autocast("cpu", torch.bfloat16):
            loss = of_model(model, x, y)
        loss.backward()
    return [p.grad for p in model.parameters()]


def gradients(of: nn.Module | lowband.Pipeline) -> list[torch.Tensor]:
    """Where one rank holds all of a unit."""
    grads = [(p.grad.as_subclass(torch.Tensor)[: p.shard_of.stop], p.shard_of.shape) for p in of.parameters()]
    return [grad.view(shape) for grad, shape in grads]


def by_breadth() -> list[torch.Tensor]:
    model = nn.Sequential(*modules())
    lowband.shard(model, "zero3", lowband.Topology({}), Layer, compute_dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        lowband.accumulate(model, batches(0, 0, MICRO_BATCHES), lambda xy: of_model(model, *xy))
    return gradients(model)


def by_stage(schedule: str) -> list[torch.Tensor]:
    topology = lowband.Topology({}, Axes(pipeline=2))
    loss = lambda out, y: loss_of(out.float(), y) / MICRO_BATCHES  # noqa: E731
    pipe = lowband.Pipeline(
        modules(), loss, "zero3", topology, MICRO_BATCHES, schedule, compute_dtype=torch.float32
    )
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(batches(0, 0, MICRO_BATCHES))
    return gradients(pipe)


def test_breadth_first() -> None:
    [expected], [got] = on_ranks(1, plainly), on_ranks(1, by_breadth)
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_stages(schedule: str) -> None:
    [expected], parts = on_ranks(1, plainly), on_ranks(2, by_stage, schedule)
    for a, b in zip([grad for part in parts for grad in part], expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)
