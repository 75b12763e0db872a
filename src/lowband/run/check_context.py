"""`lowband check-context`: a module whose tokens lie on several ranks, compared with itself on one process.

Its file defines `make(context)`, the module, for `context=None` as on one process, and `inputs()`, a batch
[B, T, ...]. All is in fp64 and on this machine's processor. Losses are a fixed random sum of the outputs, of
all tokens and then of each rank's alone: a rank without tokens that count is where gradients are lost.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch
import torch.distributed as dist
from torch import nn

from lowband.engine.parallel.context import Context
from lowband.engine.transport.everyone import everyones
from lowband.engine.transport.topology import Topology
from lowband.errors import UserError
from lowband.run.launch import RankFailure, TimeLimit
from lowband.run.on_ranks import on_ranks
from lowband.spec.axes import Axes
from lowband.spec.context import WrongLayers
from lowband.spec.step import States, StatesOption

INPUTS = "the inputs"
LIMIT_S = 300.0
MOST_RANKS = 64
Tensors = dict[str, torch.Tensor]


class Way(NamedTuple):
    """How ranks attend to each other's tokens; named for a table."""

    name: str
    attention: str | dict[str, str]
    zigzag: bool
    states: StatesOption = "auto"


@dataclass(frozen=True)
class Found:
    """Largest differences of one way, relative to the largest value of the tensor that differs.

    token:    the one whose output differs most
    what, of: the tensor whose gradient does, and the tokens that counted in its loss
    refused:  why the module cannot be run in this way; then nothing else is known
    """

    way: Way
    outputs: float = 0.0
    token: int = 0
    gradients: float = 0.0
    what: str = ""
    of: str = ""
    refused: str = ""


class _Whole(NamedTuple):
    """On one process: weights, batch, outputs, what the loss multiplies these by, gradients of a loss."""

    weights: Tensors
    inputs: torch.Tensor
    outputs: torch.Tensor
    factors: torch.Tensor


def ways(ranks: int) -> list[Way]:
    """Those that ranks can be tried in: with an even number of them, two levels too, and two ways at once.

    Where tokens lie in order, layers between may be linear.
    """
    single: list[str | dict[str, str]] = ["gather", "ring", "heads"]
    both: list[str | dict[str, str]] = [{"package": "heads", "world": "ring"}] if _inner(ranks) else []
    return [
        Way(
            _name(attention) + (", zigzag" if zigzag else ""), attention, zigzag, "auto" if zigzag else "scan"
        )
        for attention in single + both
        for zigzag in (False, True)
    ]


def ways_of_states() -> list[Way]:
    """Those of a module whose layers are all linear."""
    return [Way(f"state, {states}", "state", False, states) for states in get_args(States)]


def check_context(file: Path, ranks: int) -> list[Found]:
    """The differences of each way on so many ranks of this machine.

    Raises UserError for a file that does not define both functions, or whose module does not run.
    """
    if not 2 <= ranks <= MOST_RANKS:
        raise UserError(f"{ranks} ranks", where="--ranks", allowed=f"2 to {MOST_RANKS}, on this machine")
    if not file.is_file():
        raise UserError("no such file", where=file, allowed="a Python file with make(context) and inputs()")
    try:
        [whole] = on_ranks(1, _whole, file, time_limit_s=LIMIT_S)
        by_rank = on_ranks(ranks, _compared, file, ranks, whole, time_limit_s=LIMIT_S)
    except RankFailure as failure:
        raise UserError(str(failure).partition("\n")[0], where=file) from None
    except TimeLimit:
        raise UserError(f"it took more than {LIMIT_S:.0f} s", where=file, allowed="a smaller batch") from None
    return list(by_rank[0])


def _inner(ranks: int) -> dict[str, int]:
    return {"package": 2} if ranks > 2 and ranks % 2 == 0 else {}


def _name(attention: str | dict[str, str]) -> str:
    if isinstance(attention, str):
        return attention
    return ", ".join(f"{way} in {level}" for level, way in attention.items())


def _functions(file: Path) -> tuple[Callable[[Context | None], nn.Module], Callable[[], torch.Tensor]]:
    import runpy

    defined = runpy.run_path(str(file))
    missing = [name for name in ("make", "inputs") if not callable(defined.get(name))]
    if missing:
        raise UserError(f"does not define {missing[0]}", where=file, allowed="make(context) and inputs()")
    return defined["make"], defined["inputs"]


def _made(make: Callable[[Context | None], nn.Module], context: Context | None) -> nn.Module:
    torch.manual_seed(0)
    module = make(context)
    if not isinstance(module, nn.Module):
        what = f"make(context) returns {type(module).__name__}"
        raise UserError(what, where="make", allowed="a torch.nn.Module")
    return module.double().eval()  # dropout would draw other numbers on ranks than on one process


def _whole(file: Path) -> _Whole:
    make, make_inputs = _functions(file)
    module = _made(make, None)
    x = make_inputs()
    if not isinstance(x, torch.Tensor) or x.ndim < 2:
        raise UserError("inputs() gives no batch", where="inputs", allowed="a tensor [B, T, ...]")
    x = x.double() if x.is_floating_point() else x
    with torch.no_grad():
        outputs = _run(module, x)
    factors = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return _Whole(module.state_dict(), x, outputs, factors)


def _run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    found = module(x)
    if not isinstance(found, torch.Tensor) or found.shape[:2] != x.shape[:2]:
        shape = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
        allowed = f"a tensor [{x.shape[0]}, {x.shape[1]}, ...], as its inputs"
        raise UserError(f"the module returns {shape}", where="forward", allowed=allowed)
    return found


def _gradients(module: nn.Module, x: torch.Tensor, factors: torch.Tensor) -> tuple[torch.Tensor, Tensors]:
    """Outputs, and the gradients of their products with the factors."""
    module.zero_grad()
    x = x.clone().requires_grad_(x.is_floating_point())
    outputs = _run(module, x)
    (outputs * factors).sum().backward()
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    named += [(INPUTS, x)] if x.requires_grad else []
    return outputs.detach(), {
        name: p.new_zeros(p.shape) if p.grad is None else p.grad.contiguous() for name, p in named
    }


def _compared(file: Path, ranks: int, whole: _Whole) -> list[Found]:
    make, _ = _functions(file)
    topology, plain = Topology(_inner(ranks), Axes(context=ranks)), _made(make, None)
    plain.load_state_dict(whole.weights)
    for tried in (ways_of_states(), ways(ranks)):
        found = []
        for way in tried:
            context = Context(topology, *way[1:])
            try:
                found.append(_of_way(way, context, make, plain, whole))
            except WrongLayers:
                continue
            except UserError as error:  # on every rank: what is refused follows from shapes
                found.append(Found(way, refused=str(error)))
        if found:
            break
    return found


def _of_way(
    way: Way, context: Context, make: Callable[[Context | None], nn.Module], plain: nn.Module, whole: _Whole
) -> Found:
    module = _made(make, context)
    context.bind(module)
    if {k: v.shape for k, v in module.state_dict().items()} != {k: v.shape for k, v in whole.weights.items()}:
        raise UserError("its weights are not those of make(None)", where="make(context)")
    module.load_state_dict(whole.weights)
    outputs, largest = (0.0, 0), (0.0, "", "")
    for of, factors in _losses(context, whole):
        expected, gradients = _gradients(plain, whole.inputs, factors)
        mine, own = _gradients(module, context.split(whole.inputs), context.split(factors))
        outputs = max(outputs, *_everywhere(list(_of_tokens(context, mine, expected))))
        for name, gradient in own.items():
            if name == INPUTS:
                wanted = context.split(gradients[name])
            else:
                wanted = gradients[name]
                dist.all_reduce(gradient)
            differences = _everywhere([_difference(gradient, wanted, gradients[name])])
            largest = max(largest, (max(differences), name, of))
    return Found(way, *outputs, *largest)


def _of_tokens(context: Context, mine: torch.Tensor, expected: torch.Tensor) -> Iterator[tuple[float, int]]:
    """The difference of each of this rank's outputs, and its token, but for tokens that split added."""
    tokens, wanted = expected.shape[1], context.split(expected)
    for i, at in enumerate(context.positions(tokens).tolist()):
        if at < tokens:
            yield _difference(mine[:, i], wanted[:, i], expected), at


def _losses(context: Context, whole: _Whole) -> Iterator[tuple[str, torch.Tensor]]:
    """(tokens that count, the whole sequence's factors); those of the others are 0."""
    yield "all tokens", whole.factors
    tokens = whole.inputs.shape[1]
    mine = [at for at in context.positions(tokens).tolist() if at < tokens]
    for rank, real in enumerate(everyones(mine)):
        if real:
            factors = torch.zeros_like(whole.factors)
            factors[:, real] = whole.factors[:, real]
            yield f"the tokens of rank {rank} alone", factors


def _difference(found: torch.Tensor, wanted: torch.Tensor, whole: torch.Tensor) -> float:
    """NaN, where only one has it, is infinitely far."""
    scale = whole.abs().max().item() or 1.0
    far = torch.where(found.isnan() & wanted.isnan(), 0.0, (found - wanted).abs() / scale)
    return float(far.nan_to_num(nan=torch.inf).max())


def _everywhere(mine: list[Any]) -> list[Any]:
    """The entries of all ranks."""
    return [entry for of_rank in everyones(mine) for entry in of_rank]
