"""Reductions begin while a backward still computes, whether or not there are frozen units or buckets."""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from modules import inputs
from side_losses import Block, Net, added
from torch import nn

import lowband
from lowband.engine.units import gradients
from lowband.engine.units.bucket import Bucket
from lowband.run.on_ranks import on_ranks
from lowband.spec import buckets


def reduced(is_frozen: bool, scheme: str, in_bucket: int) -> list[tuple[str, int]]:
    """Buckets in the order of their reductions, with how many blocks had no gradient at their input yet."""
    model = Net(Block)
    if is_frozen:  # a frozen unit beside each block's own, as with adapters
        for block in model.blocks:
            block.up.requires_grad_(False)
    numel = 4 * 512  # of a unit: its parameters, each at a multiple of 256, and of 2 ranks
    with patch.object(buckets, "BUCKET_NUMEL", in_bucket * numel):
        model = lowband.shard(model, scheme, lowband.Topology({}), Block, compute_dtype=torch.float32)
    left, found, reduce = set(model.blocks), [], Bucket.start_reduce

    def passed(block: torch.nn.Module, *_: object) -> None:
        left.discard(block)

    for block in model.blocks:
        block.register_full_backward_hook(passed)

    def note(bucket: Bucket, at_boundary: bool) -> None:
        found.append((bucket.name, len(left)))
        reduce(bucket, at_boundary)

    with patch.object(Bucket, "start_reduce", note):
        added(model, inputs(0, 0)).backward()
    return found


@pytest.mark.parametrize("scheme", ["zero3", "ddp"])
@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_block_is_reduced_before_the_next_one_is_through(is_frozen: bool, scheme: str) -> None:
    for found in on_ranks(2, reduced, is_frozen, scheme, 0):
        names, left = zip(*found, strict=True)
        assert names == ("blocks.2", "blocks.1", "blocks.0", "root")
        assert left[0] >= 1


def test_a_full_bucket_is_reduced_before_the_next_one_is_through() -> None:
    for found in on_ranks(2, reduced, False, "ddp", 2):
        names, left = zip(*found, strict=True)
        assert names == ("blocks.2 to blocks.1", "blocks.0 to root")
        assert left[0] >= 1


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(4, 4), nn.Parameter(torch.tensor(0.7))

    def forward(self, x: torch.Tensor, leaves_out: str | None) -> torch.Tensor:
        if leaves_out == "inside":  # as stochastic depth does, inside of the block
            return x
        h = x if leaves_out == "function" else self.hidden(x)
        return x + (h if leaves_out == "gate" else h * self.gate)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.up(x))


class Within(torch.autograd.Function):
    """A backward within its own, as those of equilibrium and of reversible layers."""

    @staticmethod
    def forward(ctx: Any, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            ctx.x = x.detach().requires_grad_()
            ctx.y = function(ctx.x)
        return ctx.y.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:  # type: ignore[override]
        torch.autograd.backward(ctx.y, grad)
        return None, ctx.x.grad


class ByFunction(Gated):
    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return Within.apply(super().hidden, x)  # type: ignore[no-any-return]


class Tower(nn.Module):
    """Rank 1 leaves out some blocks' gates, all that is inside of them, their functions, or their calls."""

    def __init__(self, what: str, where: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.what, self.where, self.first = what, where, nn.Linear(4, 4)
        kind = ByFunction if what == "function" else Gated
        self.blocks = nn.ModuleList(kind() for _ in range(4))

    def forward(self, rank: int) -> torch.Tensor:
        x = self.first(torch.randn(3, 4, generator=torch.Generator().manual_seed(rank)))
        for place, block in enumerate(self.blocks):
            leaves_out = self.what if rank == 1 and place in self.where else None
            if leaves_out != "call":
                x = block(x, leaves_out)
        return x.square().mean()


def stepped(scheme: str, what: str, where: tuple[int, ...]) -> dict[str, torch.Tensor]:
    model = Tower(what, where)
    lowband.shard(model, scheme, lowband.Topology({}), type(model.blocks[0]), torch.float32)
    model(dist.get_rank()).backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    return lowband.full_state_dict(model)


SOME, ALL = (1, 2), (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("scheme", "what", "where"),
    [
        *((scheme, "gate", (3,)) for scheme in ("ddp", "zero2", "zero3")),
        *(
            (scheme, what, where)
            for scheme in ("ddp", "zero2", "zero3")
            for what in ("inside", "function")
            for where in ((3,), SOME, ALL)
        ),
        ("ddp", "call", SOME),
    ],
)
def test_what_some_ranks_leave_out_in_units_before_others_is_averaged(
    scheme: str, what: str, where: tuple[int, ...]
) -> None:
    """The next weights are gathered between: on every rank behind the same reductions."""
    plain = Tower(what, where)
    for rank in range(2):
        (plain(rank) / 2).backward()
    torch.optim.SGD(plain.parameters(), 0.1).step()
    torch.testing.assert_close(on_ranks(2, stepped, scheme, what, where)[0], plain.state_dict())


def asked() -> int:
    """How often a plain backward asks whether it reaches a leaf."""
    model = lowband.shard(Tower("gate", ()), "zero3", lowband.Topology({}), Gated, torch.float32)
    with patch.object(gradients, "_is_reached", side_effect=gradients._is_reached) as is_reached:
        model(0).backward()
    return is_reached.call_count


def test_only_for_leaves_that_are_late_a_backward_asks_whether_it_reaches_them() -> None:
    """Here the first layer's, which the root has; each question takes as long as a small operator."""
    assert on_ranks(1, asked) == [2]
