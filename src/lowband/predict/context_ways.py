"""Ways in which ranks along context can attend, of those that a user names."""

from collections.abc import Sequence
from typing import get_args

from lowband.spec.axes import Ways
from lowband.spec.context import check_names, every_way
from lowband.spec.machine import Machine
from lowband.spec.mesh import Mesh
from lowband.spec.model import ModelSpec
from lowband.spec.step import States, StatesOption

ALL_WAYS = "all"


def check_ways(machine: Machine, ways: Sequence[str]) -> None:
    """Raises UserError for an unknown way or level: of several ways, those in which ranks cannot attend are
    left out, and so would be a typing error."""
    check_names((way for way in ways if way != ALL_WAYS), [level.name for level in machine.levels])


def in_ways(
    machine: Machine,
    model: ModelSpec,
    ranks: int,
    axes: Ways,
    ways: Sequence[str],
    states: Sequence[StatesOption] = (),
) -> list[Ways]:
    """These axes with their ranks along context attending in each of the ways, or in all that there are.

    ways:   of layers of softmax; none: ring. Of a model without any: state
    states: how those of linear layers travel; none: by scan, or where all ways are asked for in each
    Raises UserError for ranks that cannot be divided so.
    """
    if axes.context == 1:
        return [axes]
    linear, tries_all = model.linear_layers, ALL_WAYS in ways
    if linear == model.layers and (tries_all or not ways):
        ways = ["state"]
    elif tries_all:
        ways = every_way(Mesh.fit(machine.sizes, axes.with_context(ranks)).levels("context"))
    travels = states
    if not states:
        travels = ["auto"] if not linear else [*get_args(States)] if tries_all else ["scan"]
    zigzag = axes.zigzag and not linear
    return [
        axes.model_copy(update={"context_attention": way, "context_states": one, "zigzag": zigzag})
        for way in ways or ["ring"]
        for one in travels
    ]
