"""Division of a module's parameters into units, each owned by a module."""

from collections.abc import Callable

from torch import nn

from lowband.engine.units.leaves import Slot
from lowband.engine.units.slice_of import is_of_expert
from lowband.engine.units.tied_to import tied_to

Wrap = type[nn.Module] | tuple[type[nn.Module], ...] | Callable[[nn.Module], bool]


def divide(module: nn.Module, wrap: Wrap) -> list[tuple[nn.Module, str, list[list[Slot]]]]:
    """Units as (owner, name, slots), the root's first. A parameter belongs to the innermost wrapped module
    that contains all of its places, or else to the root. Frozen parameters form separate units, as do those
    of experts that other ranks do not have, and each one of the root that other ranks of a pipeline have."""
    is_wrapped = wrap if callable(wrap) and not isinstance(wrap, type) else lambda m: isinstance(m, wrap)
    owners: dict[nn.Module, str] = {module: ""}
    owner_at: dict[str, nn.Module] = {}  # a module may have several names, inside several that are wrapped
    owners_of: dict[nn.Module, set[nn.Module]] = {}
    for name, child in module.named_modules(remove_duplicate=False):
        is_own = child is module or is_wrapped(child)
        owner_at[name] = child if is_own else owner_at[name.rpartition(".")[0]]
        owners.setdefault(owner_at[name], name)
        owners_of.setdefault(child, set()).add(owner_at[name])

    places: dict[nn.Parameter, list[Slot]] = {}
    for child in module.modules():
        for attribute, parameter in child._parameters.items():
            if parameter is not None:
                places.setdefault(parameter, []).append((child, attribute))

    groups: dict[tuple[nn.Module, bool, bool, str], list[list[Slot]]] = {}
    for parameter, slots in places.items():
        around, tied = {each for child, _ in slots for each in owners_of[child]}, tied_to(parameter)
        owner = around.pop() if len(around) == 1 and tied is None else module
        of_expert = is_of_expert(parameter)
        group = owner, parameter.requires_grad, of_expert, "" if tied is None else tied.name
        groups.setdefault(group, []).append(slots)
    order = list(owners)
    root = "root (outermost)" if "root" in owners.values() else "root"  # names of units are those of files
    units = []
    for group in sorted(groups, key=lambda group: (order.index(group[0]), not group[1], *group[2:])):
        owner, trains, of_expert, tied_name = group
        name = (tied_name or owners[owner] or root) + " (experts)" * of_expert
        units.append((owner, name if trains else f"{name} (frozen)", groups[group]))
    return units
