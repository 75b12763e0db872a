"""Steps of optimizers on shards: what is refused before, counted and made known after.

One place knows all optimizers of a process, because torch calls hooks of their steps.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lowband.engine.transport.consistency import is_alone
from lowband.engine.units.behind import Behind
from lowband.engine.units.by_unit import by_unit_of, watchers_of
from lowband.engine.units.changes import Changes, changes_of
from lowband.engine.units.copied import StateWaits
from lowband.engine.units.known_optimizers import IS_KNOWN, check_class, check_groups, is_known
from lowband.engine.units.late import Late, step_late
from lowband.engine.units.states_of_part import know_parts
from lowband.engine.units.turns import check_turns, refuse_states, step_in_turns
from lowband.engine.units.unusable import ReplacedParameter
from lowband.engine.units.waiting import check_reduced
from lowband.engine.units.zero_grad import is_whole_matrix, updated_of
from lowband.errors import UserError

_WHOLE = "_lowband_whole"  # attribute of a shard that is updated as a whole matrix
_LEAF = "_lowband_leaf"  # on a parameter that a unit computes with: the unit's name
_ELSEWHERE = "_lowband_elsewhere"  # attribute of an optimizer some of whose states are: what they are called
# How many parameters an optimizer had when those beside the shards were looked for.
_seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
TAKES_REDUCED = "_lowband_takes_reduced"  # attribute of an optimizer that takes gradients of another dtype
_ON_SHARDS = "_lowband_on_shards"  # attribute of a class's step


def mark_leaf(leaf: nn.Parameter, unit: str) -> None:
    """Have optimizers refuse a parameter that a unit computes with."""
    setattr(leaf, _LEAF, unit)


def check_unmarked(shards: Sequence[nn.Parameter]) -> None:
    """Raise UserError if a lowband.Matrices updates some of these shards."""
    for shard in shards:
        if hasattr(shard, _WHOLE):
            raise UserError(f"'{shard.shard_of.name}' is updated by another lowband.Matrices")


def mark_whole(shards: Sequence[nn.Parameter]) -> None:
    """Mark shards that a lowband.Matrices updates."""
    for shard in shards:
        setattr(shard, _WHOLE, True)


def _before_step(
    optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Refuse what would otherwise train wrongly without an error.

    Returns the step's arguments if it has a closure, which is to make the gradients.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    for parameters in groups:
        for parameter in parameters:
            if isinstance(parameter, ReplacedParameter):
                raise UserError(
                    f"holds '{parameter.place}' from before lowband.shard",
                    where=type(optimizer).__name__,
                    allowed="an optimizer made from module.parameters() after lowband.shard",
                )
            if hasattr(parameter, _WHOLE):
                raise UserError(
                    f"holds '{parameter.shard_of.name}', which lowband.Matrices updates",
                    where=type(optimizer).__name__,
                    allowed="matrices.others()",
                )
    by_unit = by_unit_of(optimizer)
    if by_unit:
        check_class(optimizer)
        _warn_of_others(optimizer)
        check_groups(optimizer, all(changes.has_all_layers for changes in by_unit))
        _check_elsewhere(optimizer, by_unit)
        if optimizer not in _stepping:
            _prepare(optimizer)
            _unwatched.add(optimizer)
            for watcher in watchers_of(by_unit):
                watcher.before_step()
    shards = [shard for of_unit in by_unit.values() for shard in of_unit]
    check = partial(_check_gradients, shards, updated_of(optimizer), optimizer)
    if not any(map(callable, (*args[1:], *kwargs.values()))):
        check()
        return None
    return (args[0], *(_then(each, check) for each in args[1:])), {
        name: _then(each, check) for name, each in kwargs.items()
    }


def _warn_of_others(optimizer: Optimizer) -> None:
    """Warns, once, of parameters beside the shards, as of a loss or a head around the sharded module.

    Each stage of a pipeline speaks for itself: another may have none.
    """
    all_ = [p for group in optimizer.param_groups for p in group["params"]]
    if _seen.get(optimizer) == len(all_) or is_alone():
        return
    _seen[optimizer] = len(all_)
    others = [p for p in all_ if p.requires_grad and changes_of(p) is None and not is_whole_matrix(p)]
    first = next(p for p in all_ if changes_of(p) is not None)
    if others and first.collectives.axis.is_first:
        text = (
            f"{type(optimizer).__name__} has {len(others)} parameters beside the shards, the first of shape "
            f"{list(others[0].shape)}, whose gradients lowband does not average. Shard a module that has all"
        )
        warnings.warn_explicit(text, UserWarning, "lowband.shard", 0)


def _check_elsewhere(optimizer: Optimizer, by_unit: Iterable[Changes]) -> None:
    """Raises UserError for a step that would read states which have no memory now: see `_unwatched`."""
    if optimizer in _stepping and hasattr(optimizer, _ELSEWHERE):
        return
    disk = next((changes.disk for changes in by_unit if changes.disk is not None), None)
    if disk is not None:
        raise UserError(
            "this step was looked up, or made, before it had shards",
            where=f"{type(optimizer).__name__} of {disk.called}",
            allowed="optimizer.step() of one made from module.parameters() after lowband.shard",
        )


def _check_gradients(
    shards: Sequence[nn.Parameter], updated: Sequence[nn.Parameter], optimizer: Optimizer
) -> None:
    """Before a step: its gradients have come, and it can take them.

    updated: those whose gradients a lowband.Matrices brings to whole matrices that are stepped
    """
    where = type(optimizer).__name__
    check_reduced(shards, where, "this step would leave out")
    with torch._C.DisableTorchFunctionSubclass():  # quicker
        left = next((shard for shard in updated if shard.grad is not None), None)
        reduced = None if hasattr(optimizer, TAKES_REDUCED) else _first_reduced(shards)
    if reduced is not None:
        raise UserError(
            f"the gradient of '{reduced.shard_of.name}' has the reduce dtype",  # type: ignore[attr-defined]
            where=where,
            allowed="lowband.AdamW, of which this module has had one; reduce_dtype=torch.float32",
        )
    if left is not None:
        raise UserError(
            f"the gradient of '{left.shard_of.name}' has not come to its matrix",  # type: ignore[attr-defined]
            where=where,
            allowed="optimizer.step() in `with matrices`, behind the backward",
        )


def _first_reduced(shards: Sequence[nn.Parameter]) -> nn.Parameter | None:
    """The first with a gradient of another dtype, which lowband.AdamW takes."""
    have = (shard for shard in shards if shard.grad is not None)
    return next((shard for shard in have if shard.grad.dtype != shard.dtype), None)  # type: ignore[union-attr]


def _then(value: Any, check: Callable[[], None]) -> Any:
    """A closure that ends with a check; anything else as it is."""
    if not callable(value):
        return value

    @wraps(value)
    def checked(*args: Any, **kwargs: Any) -> Any:
        result = value(*args, **kwargs)
        check()
        return result

    return checked


def _after_step(optimizer: Optimizer, *_: object) -> None:
    """Count the step for every unit in it. See units.changes, [Note: versions]."""
    by_unit = by_unit_of(optimizer)
    for changes in by_unit:
        changes.count_step()
    if optimizer in _unwatched:
        _unwatched.discard(optimizer)
        for watcher, shards in watchers_of(by_unit).items():
            watcher.after_step(shards)


_stepping: list[Optimizer] = []  # those whose steps run, outermost first
# Those whose steps run, but not as `_step_on_shards` has made them: the step was looked up before, or the
# optimizer has got the shards by an assignment to its groups.
_unwatched: WeakSet[Optimizer] = WeakSet()


@contextmanager
def _watched(optimizer: Optimizer) -> Iterator[None]:
    """Notify watchers of what is stepped in this context; but of a step inside of another one of the same
    shards, as a subclass or an optimizer around another makes, only once.
    """
    by_unit = by_unit_of(optimizer)
    if _stepping:
        around = {shard for each in _stepping for shards in by_unit_of(each).values() for shard in shards}
        by_unit = {unit: [s for s in shards if s not in around] for unit, shards in by_unit.items()}
    watched = watchers_of(by_unit)
    for watcher in watched:
        watcher.before_step()
    _stepping.append(optimizer)
    try:
        yield
    finally:
        _stepping.remove(optimizer)  # not the last one: other threads step, too
    for watcher, mine in watched.items():
        watcher.after_step(mine)


def _step_elsewhere(optimizer: Optimizer, step: Callable[[Optimizer], Any]) -> None:
    """A step of states that have not their memory, or their values, all the time."""
    by_unit = by_unit_of(optimizer)
    shards_of = {unit.disk: mine for unit, mine in by_unit.items() if unit.disk is not None}
    late = {disk: mine for disk, mine in shards_of.items() if isinstance(disk, Late)}
    sums = type(optimizer).__module__.startswith("lowband.")  # over ranks
    if not late:
        behind = {disk: mine for disk, mine in shards_of.items() if disk.is_behind and not sums}
        rest = {disk: mine for disk, mine in shards_of.items() if disk not in behind}
        if not behind:
            step_in_turns(optimizer, step, rest)
            return
        _before_step(optimizer, (optimizer,), {})
        update = Behind(optimizer, step, behind)
        for changes in by_unit:
            if changes.disk in update.disks:
                changes.count_step()
        apart = [shard for mine in behind.values() for shard in mine]
        if len(apart) < sum(len(group["params"]) for group in optimizer.param_groups):
            step_in_turns(optimizer, step, rest, apart)
        update.begin()
        return
    if sum(map(len, late.values())) < sum(len(group["params"]) for group in optimizer.param_groups):
        raise UserError(
            "has other parameters beside those that are updated late",
            where=type(optimizer).__name__,
            allowed="an optimizer for each",
        )
    if sums:
        raise UserError(
            "sums over ranks, which takes shards, and no update behind a forward",
            where=f"{type(optimizer).__name__} of {Late.called}",
            allowed="torch's optimizers; no offload.late",
        )
    _before_step(optimizer, (optimizer,), {})
    step_late(optimizer, step, late)
    for changes in by_unit:
        changes.count_step()


_add_param_group = Optimizer.add_param_group


@wraps(_add_param_group)
def _add_checked(optimizer: Optimizer, group: dict[str, Any]) -> None:
    """Check the class before it looks at shapes, as some do as soon as they have their parameters."""
    _add_param_group(optimizer, group)
    for parameter in optimizer.param_groups[-1]["params"]:
        if hasattr(parameter, _LEAF):
            raise UserError(
                f"holds a weight that '{getattr(parameter, _LEAF)}' computes with, and would not train it",
                where=type(optimizer).__name__,
                allowed="after an interrupted forward module.zero_grad() first, which puts the shards back",
            )
    if any(changes_of(parameter) is not None for parameter in optimizer.param_groups[-1]["params"]):
        check_class(optimizer)
        _prepare(optimizer)


def _prepare(optimizer: Optimizer) -> None:
    """Have its steps, from the next one on, know that it has shards."""
    if is_known(optimizer):
        setattr(optimizer, IS_KNOWN, True)
    if not hasattr(optimizer, _ELSEWHERE) and (disks := [c.disk for c in by_unit_of(optimizer) if c.disk]):
        setattr(optimizer, _ELSEWHERE, disks[0].called)
        refuse_states(optimizer, disks[0].place)
        if not hasattr(type(optimizer), "state"):
            type(optimizer).state = StateWaits()  # type: ignore[assignment]
    know_parts(optimizer)
    _step_on_shards(type(optimizer))


def _step_on_shards(kind: type[Optimizer]) -> None:
    """Steps of a known class on shards run without checks, which would take a percent of a step; those of any
    class run as they are written, because the compiler knows nothing of shards.

    A closure and hooks are the user's, and are checked. The class has the step, as torch's own patch of it
    does: an instance's may be the user's or a scheduler's, and would refer to the instance.
    """
    step = kind.step
    if hasattr(step, _ON_SHARDS):
        return

    @torch._disable_dynamo
    @wraps(step)
    def on_shards(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        with _watched(optimizer):
            return run(optimizer, args, kwargs)

    def run(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hooks = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
        is_users = hooks or any(value is not None for value in (*args, *kwargs.values()))
        if called := getattr(optimizer, _ELSEWHERE, None):
            check_turns(optimizer, hasattr(optimizer, IS_KNOWN), bool(is_users), called)
            with torch._C.DisableTorchFunctionSubclass():
                return _step_elsewhere(optimizer, step)
        if is_users or not hasattr(optimizer, IS_KNOWN):
            return step(optimizer, *args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return step(optimizer, *args, **kwargs)

    setattr(on_shards, _ON_SHARDS, True)
    kind.step = on_shards  # type: ignore[method-assign]


Optimizer.add_param_group = _add_checked  # type: ignore[method-assign]
register_optimizer_step_pre_hook(_before_step)
register_optimizer_step_post_hook(_after_step)
