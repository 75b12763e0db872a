"""Which shards of which units an optimizer has."""

from collections.abc import Mapping
from operator import is_

from torch import nn
from torch.optim.optimizer import Optimizer

from lowband.engine.units.changes import Changes, Watcher, changes_of

_ByUnit = dict[Changes, list[nn.Parameter]]
# Attribute of an optimizer: what `by_unit_of` has found, and for which parameters. In no table of all
# optimizers: an update that is on its way refers to its optimizer, and so would the table.
_FOUND = "_lowband_by_unit"


def by_unit_of(optimizer: Optimizer) -> _ByUnit:
    """The optimizer's shards by their unit's Changes, in its order. Not to be changed."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    known, found = getattr(optimizer, _FOUND, ([], {}))
    if len(known) == len(parameters) and all(map(is_, known, parameters)):  # asked several times a step
        return found
    found = {}
    unit: Changes | None = None  # of the parameter before: most follow others of their unit
    mine: list[nn.Parameter] = []
    for parameter in parameters:
        changes = changes_of(parameter)
        if changes is None:
            continue
        if changes is not unit:
            unit, mine = changes, found.setdefault(changes, [])
        mine.append(parameter)
    setattr(optimizer, _FOUND, (parameters, found))
    return found


def watchers_of(by_unit: Mapping[Changes, list[nn.Parameter]]) -> dict[Watcher, list[nn.Parameter]]:
    """The shards by who watches them."""
    found: dict[Watcher, list[nn.Parameter]] = {}
    for changes, shards in by_unit.items():
        if changes.watcher is not None and shards:
            found.setdefault(changes.watcher, []).extend(shards)
    return found
