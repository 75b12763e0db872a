"""An optimizer's step, unit by unit, where states are elsewhere between steps and it does not end behind
(units.behind): those that come to the device, or an optimizer that sums over ranks.

The next unit's are read, and those of the one before written, while one is updated, and so is a part of what
has its memory all the time. The last write runs on behind the next forward, whose weights were rounded and
kept before it.

[Note: options] Some optimizers count their steps in the param groups. Each unit is stepped with the options
of before the step, and what became of them is kept once, at its end.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from lowband.engine.units.copied import check_states
from lowband.engine.units.on_disk import OnDisk
from lowband.errors import UserError


def step_in_turns(
    optimizer: Optimizer,
    step: Callable[[Optimizer], Any],
    shards_of: Mapping[OnDisk, Sequence[nn.Parameter]],
    but: Iterable[nn.Parameter] = (),
) -> None:
    """Step the shards of each, and what else the optimizer has, by the class's step.

    but: what is stepped elsewhere
    """
    called = next((disk.called for disk in shards_of), OnDisk.called)
    groups, options = optimizer.param_groups, dict[int, dict[str, Any]]()  # by place of the group, after it
    moving = {disk: mine for disk, mine in shards_of.items() if any(p.grad is not None for p in mine)}
    apart = {id(p) for mine in (but, *shards_of.values()) for p in mine}
    others = [p for group in groups for p in group["params"] if id(p) not in apart]
    units = list(moving.items())
    for disk in shards_of:  # a write of the last step may have failed: nothing of this one is done yet
        disk.wait()
    each = -(-len(others) // max(1, len(units)))  # that are stepped while a unit's states come
    try:
        for disk, _ in units[:1]:
            disk.start_read()
        if others and not units:
            options |= _step_some(optimizer, groups, others, step, called)
        for place, (disk, shards) in enumerate(units):
            if some := others[place * each : (place + 1) * each]:
                options |= _step_some(optimizer, groups, some, step, called)
            disk.wait()
            for following, _ in units[place + 1 : place + 2]:
                following.start_read()
            options |= _step_some(optimizer, groups, shards, step, called)
            disk.start_write(optimizer, shards)
    finally:
        optimizer.param_groups = groups
    for place, changed in options.items():
        groups[place].update(changed)


def _step_some(
    optimizer: Optimizer,
    groups: list[dict[str, Any]],
    some: Sequence[nn.Parameter],
    step: Callable[[Optimizer], Any],
    called: str,
) -> dict[int, dict[str, Any]]:
    """A step that sees only some parameters. Returns the options of their groups, by place, after it.

    called: what takes turns
    """
    wanted = {id(parameter) for parameter in some}
    parts = [{**group, "params": [p for p in group["params"] if id(p) in wanted]} for group in groups]
    optimizer.param_groups = [part for part in parts if part["params"]]
    step(optimizer)
    check_states(optimizer, called)
    return {
        place: {key: value for key, value in part.items() if key != "params"}
        for place, part in enumerate(parts)
        if part["params"]
    }


def refuse_states(optimizer: Optimizer, place: str) -> None:
    """Have its `state_dict` and `load_state_dict` raise UserError: states have no memory between steps.

    place: where they are
    """

    def refuse(*_: object) -> None:
        raise UserError(
            f"its states are {place} between steps",
            where=type(optimizer).__name__,
            allowed="lowband.Checkpointer",
        )

    optimizer.register_state_dict_pre_hook(refuse)
    optimizer.register_load_state_dict_pre_hook(refuse)


def check_turns(optimizer: Optimizer, is_known: bool, has_more: bool, called: str) -> None:
    """Raises UserError for an optimizer that cannot step unit by unit.

    has_more: than a plain step
    called:   what takes turns
    """
    if not is_known or has_more:
        raise UserError(
            "a closure, or hooks on the step" if is_known else "is not known to work element by element",
            where=f"{type(optimizer).__name__} of {called}",
            allowed="torch's optimizers, optimizer.step() without arguments",
        )


@contextmanager
def all_in_memory(
    disks: Sequence[tuple[OnDisk, Sequence[nn.Parameter]]], optimizer: Optimizer, writes: bool
) -> Iterator[None]:
    """Read the states of all these units at once, with their shards; not counted. writes: they may change"""
    for disk, _ in disks:
        disk.start_read(is_counted=False)
    is_done = False
    try:
        for disk, _ in disks:
            disk.wait()
        yield
        is_done = True
    finally:
        for disk, shards in disks:
            if is_done and writes:
                disk.start_write(optimizer, shards, is_counted=False)
            else:
                disk.forget(is_saved=is_done)
