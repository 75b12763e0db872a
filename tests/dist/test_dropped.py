"""What a program does with weights that a unit drops, and around its forward: right or refused."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import pytest
import torch
import torch.distributed as dist
from modules import inputs
from side_losses import Block, Net, squared
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowband
from lowband.run.on_ranks import on_ranks
from tests.refused import answer

SCHEMES = ("zero3", "ddp")
DROPPED = "of a weight that was dropped after its unit's forward"
CHANGED = "weights were changed in place in a forward, where each rank computes with its own copy of them"


class Keeping(Block):
    def compute(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = [self.up.weight]
        return super().compute(x)


class Copying(Block):
    def compute(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = [self.up.weight.clone()]
        return super().compute(x)


class Viewing(Block):
    def compute(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = [self.up.weight.detach().t()]
        return super().compute(x)


class Measured(Block):
    """Looks at a weight through NumPy, whose array is gone before the unit is dropped."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        self.largest = self.up.weight.detach().numpy().max()
        return super().compute(x)


class Array(Block):
    """Keeps an array of a frozen weight's memory from its first forward on."""

    array: np.ndarray | None = None

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 6), requires_grad=False)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        if self.array is None:
            self.array = self.table.numpy()
        return super().compute(x) + x @ torch.from_numpy(self.array)


class Caching(Block):
    """Keeps views of its weights from its first forward on: one with a graph, two without."""

    views: tuple[torch.Tensor, ...] = ()

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        if not self.views:
            self.views = self.up.weight.t(), self.down.weight.detach().t(), self.gate.weight.data[1:]
        up, down, gate = self.views
        return x + F.gelu(x @ up + self.up.bias) @ down + self.down(F.gelu(self.up(x))) + gate.sum()


class Recomputed(Caching):
    """Under activation checkpointing, whose second run finds the views there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.side = torch.zeros(())
        return checkpoint(self.compute, x, use_reentrant=False)


class Early(Block):
    """Keeps a view of a weight from before it is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"rows": [self.up.weight.detach().t()]}

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(x @ self.kept["rows"][0]) @ self.down.weight.t()


class InBuffer(Block):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turned", self.up.weight.detach().t())

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(x @ self.turned) @ self.down.weight.t()


class Hidden(Block):
    def __init__(self) -> None:
        super().__init__()
        turned = self.up.weight.t()
        self.map = lambda x: x @ turned

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.map(x)) @ self.down.weight.t()


class Halved(Block):
    """Two parameters with one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Parameter(self.up.weight.data)


class Spectral(Block):
    """torch's older norm of weights keeps a view until the first forward, and does not use it."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.spectral_norm(self.up)


class Shrinking(Block):
    """Looks up rows whose norm is cut in place."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(3, 6, max_norm=0.5)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return super().compute(x) + self.rows(torch.arange(3)).sum(0)


class Clamping(Block):
    """Changes its weights in the way that it is told."""

    change: Callable[[nn.Parameter], object]

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            Clamping.change(self.up.weight)
        return super().compute(x)


class Interrupted(Block):
    is_on = False

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        if Interrupted.is_on:
            raise KeyboardInterrupt
        return super().compute(x)


def with_kept(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return squared(model, x) + sum(block.kept[0].square().mean() for block in model.blocks)


def sharded(block: type[Block], scheme: str, inner: Mapping[str, int] = MappingProxyType({})) -> nn.Module:
    return lowband.shard(Net(block), scheme, lowband.Topology(inner), block, compute_dtype=torch.float32)


def trained(model: nn.Module, loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The losses of three steps, all ranks with one input."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for step in range(3):
        losses.append(loss_of(model, inputs(step, 0)))
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).detach()


# ---- weights


def refusals() -> list[str]:
    said = [answer(lambda: trained(sharded(Keeping, "zero3"), with_kept))]
    model = sharded(Keeping, "zero3")
    with torch.no_grad():
        model(inputs(0, 0))
    said.append(answer(lambda: model.blocks[0].kept[0].sum().item()))
    said.append(answer(lambda: trained(sharded(Shrinking, "zero3"), squared)))
    return said


def test_dropped_weights_are_refused() -> None:
    for said in on_ranks(2, refusals):
        kept, evaluated, changed = said
        assert kept.startswith(f"blocks.0: square {DROPPED}")
        assert evaluated.startswith(f"blocks.0: sum {DROPPED}")
        assert changed.startswith(f"unit 'blocks.0': {CHANGED}")
        assert not any("\n" in each for each in said)


def assigned(weight: nn.Parameter) -> None:
    weight.data = weight.data.clamp(-0.1, 0.1)


CLAMPS: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda weight: weight.clamp_(-0.1, 0.1),
    "through data": lambda weight: weight.data.clamp_(-0.1, 0.1),
    "data assigned": assigned,
    "data read": lambda weight: weight.data.clamp(-0.1, 0.1),
}
COPIES = ("zero1", "zero2", "zero3")  # ranks compute with copies, held or gathered, of what they step


def clamped() -> dict[tuple[str, str], str]:
    found = {}
    for scheme in COPIES:
        for name, change in CLAMPS.items():
            Clamping.change = change
            found[scheme, name] = answer(lambda scheme=scheme: trained(sharded(Clamping, scheme), squared))
    return found


def test_changes_in_a_forward_are_refused() -> None:
    for found in on_ranks(2, clamped):
        for (scheme, name), said in found.items():
            expected = {"data read": "", "data assigned": "blocks.0: .data of a weight was set"}
            assert said.startswith(expected.get(name, f"unit 'blocks.0': {CHANGED}")), (scheme, name, said)
            assert bool(said) == (name != "data read") and "\n" not in said


CASES = [
    *((block, with_kept, scheme) for block in (Copying, Viewing) for scheme in SCHEMES),
    (Keeping, with_kept, "ddp"),  # every rank holds all weights all the time
    *((block, squared, scheme) for block in (Spectral, Measured, Array) for scheme in SCHEMES),
]


def all_trained() -> list[torch.Tensor]:
    return [trained(sharded(block, scheme), loss_of) for block, loss_of, scheme in CASES]


def test_what_is_not_dropped_is_right() -> None:
    for (block, loss_of, scheme), found in zip(CASES, on_ranks(2, all_trained)[0], strict=True):
        assert torch.allclose(found, trained(Net(block), loss_of), rtol=1e-6), (block, scheme)


def shrunk(own_data: bool) -> tuple[str, torch.Tensor | None]:
    """What is said of an embedding whose rows a forward cuts under ddp, and the losses."""
    model, found = sharded(Shrinking, "ddp"), []
    rank = dist.get_rank() if own_data else 0
    said = answer(lambda: found.append(trained(model, lambda model, x: squared(model, x * (1 + rank)))))
    return said, found[0] if found else None


def test_each_ranks_own_changes_are_refused() -> None:
    [(said, losses)] = on_ranks(1, shrunk, True)
    assert said == ""
    assert torch.allclose(losses, trained(Net(Shrinking), squared), rtol=1e-6)
    for own_data in (True, False):
        assert all(
            said.startswith(f"unit 'blocks.0': {CHANGED}") for said, _ in on_ranks(2, shrunk, own_data)
        )


# ---- views that are kept over steps

CACHING = (Caching, Recomputed)
KEPT = ("ddp", "zero1", "zero2", "zero3", "hsdp", "hpz")
INNER = {"package": 1, "node": 2}


def losses_of(model: nn.Module) -> torch.Tensor:
    """Of three steps and of an evaluation after them."""
    losses = trained(model, squared)
    with torch.no_grad():
        return torch.cat([losses, squared(model, inputs(3, 0)).view(1)])


def cached() -> dict[tuple[type[Block], str], torch.Tensor]:
    return {(block, s): losses_of(sharded(block, s, INNER)) for block in CACHING for s in KEPT}


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.wide)])
def test_kept_views_show_new_values(ranks: int) -> None:
    expected = {block: losses_of(Net(block)) for block in CACHING}
    for found in on_ranks(ranks, cached):
        for (block, scheme), losses in found.items():
            torch.testing.assert_close(losses, expected[block], rtol=1e-6, atol=0, msg=f"{block} {scheme}")


def used_before_its_unit() -> str:
    """A view that is kept from the step before is used ahead of its unit's forward."""
    model = sharded(Caching, "zero3")
    trained(model, squared)
    loss = model.blocks[0].views[0].square().mean()
    try:
        (loss + squared(model, inputs(0, 0))).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_old_values_of_kept_views_are_refused_by_torch() -> None:
    for said in on_ranks(2, used_before_its_unit):
        assert "has been modified by an inplace operation" in said
        assert "\n" not in said


OF_OLD = "of a view of a parameter from before lowband.shard, which has kept its old values"
OLD_VIEWS = {
    Early: f"blocks.0.kept, of 'blocks.0.up.weight': matmul {OF_OLD} (allowed: a view made in the forward)",
    InBuffer: f"blocks.0.turned, of 'blocks.0.up.weight': matmul {OF_OLD}",
    Hidden: "Linear.weight: a gradient comes to a parameter from before lowband.shard, and would be lost",
    Halved: "Net: 'blocks.0.up.weight' shares its memory with 'blocks.0.second', and each would be trained",
}


def said_of_old_views() -> list[list[str]]:
    return [
        [answer(lambda b=block, s=scheme: trained(sharded(b, s), squared)) for block in OLD_VIEWS]
        for scheme in SCHEMES
    ]


def test_views_from_before_are_refused() -> None:
    for found in on_ranks(2, said_of_old_views):
        for said in found:
            for text, expected in zip(said, OLD_VIEWS.values(), strict=True):
                assert expected in text
                assert "\n" not in text


# ---- an interrupted forward


def interrupted() -> list[object]:
    """Hooks that are open after an interrupted forward; what an optimizer says; losses of training on."""
    found: list[object] = []
    for scheme in SCHEMES:
        model = sharded(Interrupted, scheme)
        Interrupted.is_on = True
        with pytest.raises(KeyboardInterrupt):
            model(inputs(0, 0))
        Interrupted.is_on = False
        said = answer(lambda model=model: trained(model, squared))
        model.zero_grad()
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
        found.append((said, hooks, trained(model, squared)))
    return found


def test_an_interrupted_forward_leaves_nothing() -> None:
    for said, hooks, losses in on_ranks(2, interrupted)[0]:
        assert "SGD: holds a weight that 'root' computes with" in said
        assert hooks is None
        assert torch.equal(losses, trained(Net(Block), squared))


def written_when_interrupted() -> list[str]:
    """What the next forward says of weights that were written to while the module had them whole."""
    said = []
    for scheme in (*SCHEMES, "zero1"):
        model = sharded(Interrupted, scheme)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        squared(model, inputs(0, 0)).backward()
        Interrupted.is_on = True
        with pytest.raises(KeyboardInterrupt):
            model(inputs(0, 0))
        Interrupted.is_on = False
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        optimizer.step()
        said.append(answer(squared, model, inputs(0, 0)))
    return said


def test_what_is_written_behind_an_interrupted_forward_is_not_lost() -> None:
    for said in on_ranks(2, written_when_interrupted):
        for text in said:
            assert "weights were changed in place in a forward" in text


# ---- torch.func

TRANSFORMS: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "grad": lambda model, x: torch.func.grad(lambda x: squared(model, x))(x),
    "vjp": lambda model, x: torch.func.vjp(model, x)[1](model(x).detach())[0],
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
    "jacrev": lambda model, x: torch.func.jacrev(model)(x),
    "jacfwd": lambda model, x: torch.func.jacfwd(model)(x),
    "vmap": lambda model, x: torch.func.vmap(model)(x),
}


def transformed() -> dict[tuple[str, str], tuple[torch.Tensor, torch.Tensor]]:
    """What each transform gives, and the losses of training after it."""
    found = {}
    for scheme in SCHEMES:
        for name, transform in TRANSFORMS.items():
            model = sharded(Block, scheme)
            found[scheme, name] = transform(model, inputs(0, 0)).detach(), trained(model, squared)
    return found


def test_functional_transforms_go_around() -> None:
    losses = trained(Net(Block), squared)
    for (scheme, name), (value, after) in on_ranks(2, transformed)[0].items():
        assert torch.equal(value, TRANSFORMS[name](Net(Block), inputs(0, 0)).detach()), (scheme, name)
        assert torch.equal(after, losses), (scheme, name)


def slope(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """A gradient penalty by torch.func, in whose graphs nothing is saved by name."""
    return torch.func.grad(lambda x: squared(model, x))(x).square().sum()


def penalised() -> list[torch.Tensor]:
    topology = lowband.Topology({"node": 1})
    return [
        trained(lowband.shard(Net(Block), scheme, topology, Block, compute_dtype=torch.float32), slope)
        for scheme in ("zero3", "hpz")
    ]


def test_functional_gradients_have_gradients() -> None:
    [expected] = on_ranks(1, lambda: trained(Net(Block), slope))
    for losses in on_ranks(2, penalised)[0]:
        assert torch.allclose(losses, expected, rtol=1e-5)
