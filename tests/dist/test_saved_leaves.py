"""Saved-tensor hooks open outside or inside of a unit: what they keep, how often units compute."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from kept import has_memory
from modules import inputs
from side_losses import Block, Net, Recomputed, added, squared
from torch import nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowband
from lowband.run.on_ranks import on_ranks


@dataclass
class Seen:
    """Of one forward and backward.

    computed: forwards of blocks, recomputation included
    kept:     sizes of the tensors, parameters left out, that the hooks opened outside were given
    alive:    blocks whose gathered weights are still in memory between forward and backward
    """

    gradients: list[torch.Tensor] = field(default_factory=list)
    computed: int = 0
    kept: list[int] = field(default_factory=list)
    alive: int = 0


class InsideCheckpointed(Block):
    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(checkpoint(lambda x: F.gelu(self.up(x)), x, use_reentrant=False))


class InsideOnCpu(Block):
    def compute(self, x: torch.Tensor) -> torch.Tensor:
        with save_on_cpu():
            return super().compute(x)


class Checkpointed(Net):
    """Around its whole forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


MAKES: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Net(Block),
    "checkpoint around units": lambda: Recomputed(Block),
    "checkpoint inside of the root": lambda: Checkpointed(Block),
    "checkpoint inside of units": lambda: Net(InsideCheckpointed),
    "save_on_cpu inside of units": lambda: Net(InsideOnCpu),
}


def around_root(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(model, x, use_reentrant=False).square().mean()


@contextmanager
def counting(parameters: set[tuple[int, ...]], sizes: list[int]) -> Iterator[None]:
    """Hooks that note the sizes of what they are given, but for parameters and their transposes."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape) not in parameters and tuple(tensor.shape)[::-1] not in parameters:
            sizes.append(tensor.numel())
        return tensor.detach()

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def seen(
    model: nn.Module,
    loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor],
    around: Callable[[Seen], AbstractContextManager[None]],
) -> Seen:
    found, storages = Seen(), []

    def count(up: nn.Module, _: object) -> None:
        found.computed += 1
        storages.append(StorageWeakRef(up.weight.untyped_storage()))

    for block in model.blocks:
        block.up.register_forward_pre_hook(count)
    with around(found):
        loss = loss_of(model, inputs(0, 0))
    found.alive = sum(map(has_memory, storages))
    loss.backward()
    return found


def cases() -> Iterator[tuple[str, Callable, Callable, Callable]]:
    shapes = {tuple(p.shape) for p in Net(Block).parameters()}
    outside = [lambda _: nullcontext(), lambda _: save_on_cpu(), lambda found: counting(shapes, found.kept)]
    for name, make in MAKES.items():
        for around in outside:
            yield name, make, squared, around
    yield "checkpoint around the root", MAKES["plain"], around_root, outside[0]
    yield "side losses", MAKES["plain"], added, outside[2]
    yield "side losses, checkpoint around units", MAKES["checkpoint around units"], added, outside[2]


def plain() -> list[Seen]:
    found = []
    for _, make, loss_of, around in cases():
        model = make()
        found.append(seen(model, loss_of, around))
        found[-1].gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]
    return found


def sharded(scheme: str) -> list[Seen]:
    topology, found = lowband.Topology({}), []
    for _, make, loss_of, around in cases():
        model = lowband.shard(make(), scheme, topology, Block, compute_dtype=torch.float32)
        found.append(seen(model, loss_of, around))
        found[-1].gradients = [whole(p.grad.as_subclass(torch.Tensor), p) for p in model.parameters()]
    return found


def whole(grad: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    of = parameter.shard_of
    parts: list[torch.Tensor] = [None] * dist.get_world_size()  # type: ignore[list-item]
    dist.all_gather_object(parts, grad[: of.stop - of.start])
    return torch.cat([parts[rank] for rank in of.ranks]).view(of.shape)


@pytest.mark.parametrize("scheme", ["zero3", pytest.param("zero1", marks=pytest.mark.wide)])
def test_hooks_outside_and_inside_get_what_they_get_of_a_plain_module(scheme: str) -> None:
    """The same recomputations, the same tensors kept, no weights: every rank has the same input."""
    names = [name for name, *_ in cases()]
    [expected] = on_ranks(1, plain)
    for name, got, want in zip(names, on_ranks(2, sharded, scheme)[0], expected, strict=True):
        assert got.computed == want.computed, name
        assert sorted(got.kept) == sorted(want.kept), name
        # On a CPU save_on_cpu keeps what it is given, and inside of a unit it hides the engine's hooks.
        if scheme == "zero3" and name != "save_on_cpu inside of units":
            assert got.alive == 0, name
        for mine, theirs in zip(got.gradients, want.gradients, strict=True):
            assert torch.equal(mine, theirs), name


class Overwriting(Block):
    """Changes in place what autograd has saved."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x).exp()
        y += 1
        return x + self.down(y)


def overwritten() -> str:
    topology = lowband.Topology({})
    model = lowband.shard(Net(Overwriting), "zero3", topology, Block, compute_dtype=torch.float32)
    try:
        squared(model, inputs(0, 0)).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_change_in_place_is_refused_as_by_torch() -> None:
    for said in on_ranks(2, overwritten):
        assert "modified by an inplace operation: [torch.FloatTensor [4, 9]] is at version 1" in said
