"""A case's modules, their inputs and optimizers: the same for the ranks and for the one process."""

import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.random.cases import Case, Net, Part

DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Blown(ArithmeticError):
    """What a fuse raises."""


class Fuse:
    """Every part passes through it. Raises where it is armed, once."""

    def __init__(self) -> None:
        self._armed: tuple[str, int, int] | None = None
        self._pauses: Random | None = None

    def arm(self, where: str, net: int, place: int) -> None:
        self._armed = where, net, place

    def disarm(self) -> None:
        self._armed = None

    def slow_down(self, random: Random) -> None:
        """From now on every pass through the fuse may take a little longer."""
        self._pauses = random

    def pass_through(self, where: str, net: int, place: int) -> None:
        if self._pauses is not None and self._pauses.random() < 0.3:
            time.sleep(0.004 * self._pauses.random())
        if where == "forward" and torch._C._current_graph_task_id() != -1:
            where = "recompute"
        if self._armed == (where, net, place):
            self._armed = None
            raise Blown(f"{where} of place {place} of net {net}")


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, fuse: Fuse, net: int, place: int) -> torch.Tensor:
        ctx.fuse, ctx.net, ctx.place = fuse, net, place
        fuse.pass_through("forward", net, place)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        ctx.fuse.pass_through("backward", ctx.net, ctx.place)
        return grad, None, None, None


Through = Callable[[torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    """A part's module. `is_unit` is for the wrap predicate, `through` is the fuse inside the computation."""

    def __init__(self, is_unit: bool) -> None:
        super().__init__()
        self.is_unit = is_unit


class Mlp(Layer):
    def __init__(self, features: int, width: int, is_unit: bool) -> None:
        super().__init__(is_unit)
        self.up, self.down = nn.Linear(features, width), nn.Linear(width, features)

    def forward(self, x: torch.Tensor, through: Through) -> torch.Tensor:
        return self.down(through(self.up(x).tanh()))


class Norm(Layer):
    """With a buffer that the compute dtype does not apply to."""

    def __init__(self, features: int, is_unit: bool) -> None:
        super().__init__(is_unit)
        self.norm = nn.LayerNorm(features)
        self.register_buffer("shift", torch.linspace(0, 1, features))

    def forward(self, x: torch.Tensor, through: Through) -> torch.Tensor:
        return (self.norm(through(x)) + self.shift).to(x.dtype)


class Scale(Layer):
    """A scalar, a vector, and a parameter that is never used."""

    def __init__(self, features: int, is_unit: bool) -> None:
        super().__init__(is_unit)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.offset = nn.Parameter(torch.randn(features))
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, through: Through) -> torch.Tensor:
        return through(x * self.gain) + self.offset


class Branch(Layer):
    def __init__(self, features: int, width: int, is_unit: bool, is_nested: bool) -> None:
        super().__init__(is_unit)
        self.left, self.right = Mlp(features, width, is_nested), Mlp(features, 3, is_nested)

    def forward(self, x: torch.Tensor, through: Through) -> torch.Tensor:
        return through(self.left(x, through)) - self.right(x, through).tanh()


class Aux(Layer):
    """Two outputs, of which the second goes straight into the loss."""

    def __init__(self, features: int, is_unit: bool) -> None:
        super().__init__(is_unit)
        self.linear = nn.Linear(features, features)

    def forward(self, x: torch.Tensor, through: Through) -> tuple[torch.Tensor, torch.Tensor]:
        y = through(self.linear(x))
        return y.tanh(), y.square().mean()


class Chain(nn.Module):
    """A net of the case."""

    def __init__(self, net: Net, index: int, fuse: Fuse) -> None:
        super().__init__()
        self.net, self.index, self.fuse = net, index, fuse
        self.stem = None if net.stem == "none" else nn.Linear(net.features, net.features)
        self.layers = nn.ModuleList()
        for part in net.parts:
            shared = part.shares
            self.layers.append(self._layer(part) if shared is None else self.layers[shared])
        for place, part in enumerate(net.parts):
            if part.tied is not None:
                self.layers[place].up.weight = self.layers[part.tied].up.weight
        if self.stem is not None:
            self.stem.requires_grad_(net.stem == "trained")
        for place, part in enumerate(net.parts):
            if part.shares is None and part.frozen != "none":
                for i, parameter in enumerate(self.layers[place].parameters()):
                    parameter.requires_grad_(part.frozen == "some" and i % 2 == 1)
        for parameter in self.layers[-1].down.parameters():  # gradients reach the loss
            parameter.requires_grad_(True)

    def _layer(self, part: Part) -> Layer:
        features = self.net.features
        make: dict[str, Callable[[], Layer]] = {
            "mlp": lambda: Mlp(features, part.width, part.wrapped),
            "norm": lambda: Norm(features, part.wrapped),
            "scale": lambda: Scale(features, part.wrapped),
            "branch": lambda: Branch(features, part.width, part.wrapped, part.nested),
            "aux": lambda: Aux(features, part.wrapped),
        }
        return make[part.kind]()

    def forward(self, x: torch.Tensor, skipped: Sequence[int] = ()) -> Any:
        x = x if self.stem is None else self.stem(x)
        aux = torch.zeros(())
        for place, (part, layer) in enumerate(zip(self.net.parts, self.layers, strict=True)):
            if place in skipped:
                continue
            y, of_aux = self._pass(place, part, layer, x)
            x = x + y if part.residual else y
            aux = aux + of_aux
        if self.net.returns == "loss":
            return loss_of({"x": x, "aux": aux})
        return {"x": x, "aux": aux} if self.net.returns == "dict" else x

    def _pass(self, place: int, part: Part, layer: Layer, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        def through(x: torch.Tensor) -> torch.Tensor:
            return _Through.apply(x, self.fuse, self.index, place)

        if part.checkpoint == "none":
            y = layer(x, through)
        else:
            y = checkpoint(layer, x, through, use_reentrant=part.checkpoint == "reentrant")
        return y if isinstance(y, tuple) else (y, 0.0)


def is_unit(module: nn.Module) -> bool:
    return getattr(module, "is_unit", False)


def nets_of(case: Case, fuse: Fuse) -> list[Chain]:
    """The modules, with their initial values."""
    torch.manual_seed(case.seed)
    return [Chain(net, index, fuse) for index, net in enumerate(case.nets)]


def loss_of(output: Any) -> torch.Tensor:
    """fp32, from what the last net returns."""
    if isinstance(output, dict):
        return output["x"].float().square().mean() + output["aux"].float()
    return output.float() if output.dim() == 0 else output.float().square().mean()


def run_nets(
    case: Case, nets: Sequence[Chain], number: int, rank: int, skipped: Sequence[int]
) -> torch.Tensor:
    """The loss of one micro-batch."""
    x = _input(case, number, rank)
    *earlier, last = [nets[0], *nets] if case.again else nets
    for chain in earlier:
        output = _call(chain, x, ())
        x = output["x"] if isinstance(output, dict) else output
    return loss_of(_call(last, x, skipped))


def _call(chain: Chain, x: torch.Tensor, skipped: Sequence[int]) -> Any:
    if chain.net.checkpoint == "none":
        return chain(x, skipped=skipped)
    return checkpoint(chain, x, skipped, use_reentrant=chain.net.checkpoint == "reentrant")


def _input(case: Case, number: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * case.seed + 10 * number + rank)
    return torch.randn(1 + (case.seed + number) % 4, case.nets[0].features, generator=generator)


def is_matrix(_name: str, shape: Sequence[int]) -> bool:
    """Whether Muon updates it."""
    return len(shape) == 2


def optimizers_of(
    case: Case, parameters: Sequence[nn.Parameter], matrices: Sequence[nn.Parameter] = ()
) -> list[torch.optim.Optimizer | None]:
    """By number; None for one that gets no parameters. matrices: those of a case that has some, not among
    `parameters`
    """
    count = len(case.optimizers)
    dealt = [list(parameters[i::count]) for i in range(count)]
    if case.has_matrices:
        dealt = [list(matrices), list(parameters)]
    return [
        _optimizer(name, mine) if mine else None for name, mine in zip(case.optimizers, dealt, strict=True)
    ]


def _optimizer(name: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if name == "muon":
        return torch.optim.Muon(parameters, lr=2e-2)
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    if name == "adagrad":
        return torch.optim.Adagrad(parameters, lr=1e-2)
    if name == "momentum":
        return torch.optim.SGD(parameters, lr=5e-3, momentum=0.9, nesterov=True)
    return torch.optim.SGD(parameters, lr=5e-2)
