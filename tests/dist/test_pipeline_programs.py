"""Small programs beside stages: what modules do to weights under a split schedule, and what losses take."""

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from staged import D, batches, chain, loss_of
from torch import nn
from torch.utils.checkpoint import checkpoint

import lowband
from lowband.engine.parallel.deferred import Deferred
from lowband.run.launch import RankFailure
from lowband.run.on_ranks import on_ranks
from lowband.spec.axes import Axes


class Recomputing(nn.Module):
    """Has no submodules, and checkpoints what it computes itself."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(2 * D, D) / 4), nn.Parameter(torch.randn(D, 2 * D) / 4)

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.linear(torch.tanh(F.linear(x, self.up)), self.down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.branch, x, use_reentrant=False)


class CalledAgain(nn.Linear):
    """Recomputes its whole call, hooks and all, reentrantly, as Hugging Face's layers do."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().__call__, x, use_reentrant=True)


class Hooked(nn.Linear):
    """Halves the gradient of its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self.weight, "is_hooked"):
            self.weight.register_hook(lambda grad: grad / 2)
            self.weight.is_hooked = True
        return super().forward(x)


class Mapped(nn.Module):
    """Computes under transforms of torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _, slope = torch.func.jvp(self.layer, (x,), (torch.ones_like(x),))
        return x + torch.tanh(torch.func.vmap(self.layer)(x)) + slope


INNER = [Recomputing, lambda: Hooked(D, D), Mapped]


Makes = Sequence[Callable[[], nn.Module]]


def modules(inner: Makes) -> list[nn.Module]:
    embed, head = chain(0)
    torch.manual_seed(2)
    return [embed, *(make() for make in inner), *(make() for make in inner), head]


def gradients(schedule: str, inner: Makes = INNER) -> tuple[int, dict[str, torch.Tensor]]:
    """How many linear layers have put their weights' gradients off; all gradients."""
    topology, late = lowband.Topology({}, Axes(pipeline=2)), []
    pipe = lowband.Pipeline(
        modules(inner), loss_of, "zero3", topology, 3, schedule, compute_dtype=torch.float32
    )
    run = Deferred.run
    Deferred.run = lambda self: (late.append(len(self._factors)), run(self))
    pipe.step(batches(0, 0, 3))
    grads = {n: p.grad.as_subclass(torch.Tensor)[: p.shard_of.stop] for n, p in pipe.named_parameters()}
    return sum(late), {n: grads[n].view(p.shard_of.shape) for n, p in pipe.named_parameters()}


def gradients_alone(inner: Makes = INNER) -> dict[str, torch.Tensor]:
    model = nn.Sequential(*modules(inner))
    for x, y in batches(0, 0, 3):
        loss_of(model(x), y).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def test_a_split_backward_of_weights_with_hooks_of_own_checkpoints_and_of_transforms() -> None:
    (early, first), (late, last) = on_ranks(2, gradients, "zb-h1")
    assert (early, late) == (0, 3)  # of the head alone, in each micro-batch
    [expected] = on_ranks(1, gradients_alone)
    both = {**first, **last}
    assert both.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(both[name], grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_calls_that_are_recomputed_reentrantly(schedule: str) -> None:
    inner = [partial(CalledAgain, D, D)] * 2
    parts = [grads for _, grads in on_ranks(2, gradients, schedule, inner)]
    [expected] = on_ranks(1, gradients_alone, inner)
    assert parts[0].keys() | parts[1].keys() == expected.keys()
    for name, grad in expected.items():
        got = parts[0].get(name, parts[1].get(name))
        torch.testing.assert_close(got, grad, rtol=1e-6, atol=1e-7)


# ---- losses that take what is not handed on


class Penalized(nn.Module):
    """Keeps a side loss in an attribute."""

    penalty: torch.Tensor | float = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.penalty = y.square().mean()
        return y


def penalized() -> list[nn.Module]:
    embed, head = chain(0)
    return [embed, *(Penalized() for _ in range(3)), head]


def of_attributes(kept: list[nn.Module]) -> torch.Tensor | float:
    return sum(module.penalty for module in kept if isinstance(module, Penalized))


def of_weights(kept: list[nn.Module]) -> torch.Tensor:
    return sum(parameter.square().sum() for module in kept for parameter in module.parameters())


def step_with(schedule: str, beside: Callable[[list[nn.Module]], torch.Tensor]) -> list[str]:
    """Warnings of a step whose loss takes something beside the output."""
    kept, topology = penalized(), lowband.Topology({}, Axes(pipeline=2))
    pipe = lowband.Pipeline(kept, lambda x, y: loss_of(x, y) + beside(kept), "zero3", topology, 2, schedule)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        pipe.step(batches(0, 0, 2))
    return [str(each.message) for each in said if "a pipeline" in str(each.message)]


@pytest.mark.parametrize(("schedule", "beside"), [("zb-v", of_attributes), ("1f1b", of_weights)])
def test_a_loss_of_other_stages_is_refused(schedule: str, beside) -> None:
    with pytest.raises(RankFailure, match="takes what its stage does not compute"):
        on_ranks(2, step_with, schedule, beside)


def test_side_losses_kept_on_other_ranks_are_warned_of() -> None:
    [[warned], last] = on_ranks(2, step_with, "1f1b", of_attributes)
    assert "hand it on with the output" in warned
    assert last == []
