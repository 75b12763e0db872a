"""Exact sums over whole parameters, from the parts that ranks hold: norms for users and for optimizers.

Each rank sums its part in fp64, and one all-reduce adds the sums of all parameters. So every rank that shares
a parameter has the same bits, and but for the rounding of fp64 they do not depend on how it is sharded.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from lowband.engine.collectives.collectives import Collectives
from lowband.engine.transport.call import Call
from lowband.engine.transport.lane import Work, outside_of_modes
from lowband.engine.units.shard_parameter import ShardParameter
from lowband.errors import UserError
from lowband.spec.mesh import SELF
from lowband.spec.step import NORM_GATHER, Collective

# No row of a step: a scheme has no wire of that name, so values travel unchanged.
_SUMS = Collective("shard_sums", "all_reduce", SELF, "optim", "masters", "step", None)

_PARAMETERS = "those of module.parameters() after lowband.shard"


@outside_of_modes()
def norms(
    parameters: Iterable[nn.Parameter], values: Iterable[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """The 2-norm of each whole parameter, or of values that are sharded as it is.

    parameters: shards, as `module.parameters()` are after lowband.shard
    values:     for each of them this rank's part, of the shard's shape or without the padding; default: its
                own values

    Returns scalars in fp64, the same bits on every rank that shares the parameter. Every rank must call it,
    with the same parameters in the same order. Under a scheme with sync, replicas have norms of their own.
    Raises UserError for a parameter that is no shard, or of one that is cut over tensor or expert ranks, and
    for values of which not each has its parameter's shape.
    """
    if isinstance(parameters, nn.Module):
        raise UserError("a module", where="norms over ranks", allowed=_PARAMETERS)
    parameters = [_shard(p) for p in parameters]
    parts = [part_of(p) for p in parameters] if values is None else list(values)
    if len(parts) != len(parameters) or not all(map(_is_part, parts, parameters)):
        raise UserError(
            "values of other shapes than the parameters, or none for some",
            where="norms over ranks",
            allowed="for each parameter a tensor of its shape; p.grad of those alone that have one",
        )
    squares = []
    for parameter, part in zip(parameters, parts, strict=True):
        of = parameter.shard_of
        own = part.detach().as_subclass(torch.Tensor)[: of.stop - of.start]  # without the padding behind
        squares.append(torch.linalg.vector_norm(own, dtype=torch.float64).square().view(1))
    return [total.view(()).sqrt() for total in sum_parts(parameters, squares)]


def _is_part(values: Any, parameter: ShardParameter) -> bool:
    of = parameter.shard_of
    return isinstance(values, torch.Tensor) and values.shape in (parameter.shape, (of.stop - of.start,))


def part_of(parameter: nn.Parameter) -> torch.Tensor:
    """This rank's values of a parameter, 1D, padded; writes to them change the parameter."""
    return parameter.detach().as_subclass(torch.Tensor)


def sum_parts(parameters: Sequence[nn.Parameter], mine: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """For each parameter, the sum of `mine` over the ranks that share it.

    mine: 1D, fp64, as long on each of these ranks
    Every rank must call it with the same parameters. Raises UserError for a parameter that is no shard.
    """
    together: dict[Collectives, list[int]] = {}
    for i, parameter in enumerate(parameters):
        of = _shard(parameter).shard_of
        if of.slice_of is not None:
            what = f"'{of.name}' is cut over {of.slice_of.axis} ranks, whose parts are not summed"
            allowed = "lowband.clip_grad_norm_(module, max_norm); an optimizer that works by elements"
            raise UserError(what, where="norms over ranks", allowed=allowed)
        together.setdefault(_shard(parameter).collectives, []).append(i)
    sums: dict[int, torch.Tensor] = {}
    for collectives, places in together.items():
        parts = _summed(collectives, torch.cat([mine[i] for i in places]))
        sums |= zip(places, parts.split([len(mine[i]) for i in places]), strict=True)
    return [sums[i] for i in range(len(mine))]


def _summed(collectives: Collectives, flat: torch.Tensor) -> torch.Tensor:
    """The sum over the ranks of the optimizer's level. flat: 1D"""
    ranks = collectives.axis.levels.size(collectives.scheme.optim)
    padded = nn.functional.pad(flat, (0, -len(flat) % ranks)).to(collectives.device)
    found: list[torch.Tensor] = []

    def reduce(call: Call) -> Work:
        total = yield from collectives.reduce(call, call.hold(padded), _SUMS)
        call.release(total)
        found.append(total)

    collectives.submit("sums", collectives.levels_of_reduction(_SUMS, padded.dtype), reduce, [padded]).wait()
    return found.pop()[: len(flat)].to(flat.device)


def sum_over_replica(collectives: Collectives, mine: torch.Tensor) -> torch.Tensor:
    """The sum of the values, of shape [1], of all ranks that average gradients with this one.

    It is bit-equal on all of them, and counted as `norm_gather`.
    """
    level = collectives.scheme.level("replica")
    everyones = mine.new_empty(collectives.axis.levels.size(level))
    collectives.submit(
        "norm",
        collectives.inwards(SELF, level),
        lambda call: collectives.gather(call, mine, everyones, SELF, level, NORM_GATHER),
    ).wait()
    return everyones.sum()


def step_begun(
    optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None
) -> tuple[Any, list[tuple[dict[str, Any], ShardParameter]]]:
    """What `closure` returns, which is called with gradients enabled; then the shards that have gradients,
    with their groups, but for parameters without elements. Raises UserError for a parameter that is no shard.
    """
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    pairs = [(group, _shard(p)) for group in optimizer.param_groups for p in group["params"]]
    return loss, [(group, p) for group, p in pairs if p.grad is not None and p.shard_of.shape.numel()]


def _shard(parameter: nn.Parameter) -> ShardParameter:
    if not isinstance(parameter, ShardParameter):
        raise UserError(
            "a parameter is no shard",
            where="norms over ranks",
            allowed=_PARAMETERS,
        )
    return parameter
