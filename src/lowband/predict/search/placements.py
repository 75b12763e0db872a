"""Every placement of weights, gradients and optimizer over the levels, with its wires."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from lowband.cost.bytes import transfers
from lowband.predict.groups import is_new
from lowband.predict.search.candidates import KNOBS, WIRES, Knobs
from lowband.predict.search.software import Software
from lowband.predict.workload import Workload
from lowband.spec.mesh import Levels
from lowband.spec.scheme import Scheme


@lru_cache(maxsize=64)
def schemes(levels: Levels, exact: bool = False) -> tuple[Scheme, ...]:
    """Every placement and its wires. Levels with no more ranks than the level inside them are left out.

    exact: whether all wires are native
    """
    found = []
    names = ["self", *(name for name in levels.names[1:] if _adds_ranks(levels, name))]
    for weights, grads, optim in itertools.combinations_with_replacement(names, 3):
        for secondary in (None, *names[: names.index(weights)]):
            placed = Scheme(name="plan", weights=weights, secondary=secondary, grads=grads, optim=optim)
            used = {t.collective.name for t in transfers(levels.world, False, placed, levels, "bf16", "bf16")}
            choices = [wires if name in used and not exact else wires[:1] for name, wires in WIRES.items()]
            for wires in itertools.product(*choices):
                found.append(placed.model_copy(update=dict(zip(WIRES, wires, strict=True))))
    return tuple(found)


def _adds_ranks(levels: Levels, name: str) -> bool:
    i = levels.index(name)
    return levels.sizes[i] > levels.sizes[i - 1]


@dataclass(frozen=True, eq=False)
class Table:
    """Schemes that a job may run under: those with the same states and as many lossy wires in a row.

    placed:  of each, its states and the number of lossy wires
    holders: of each, which rows of the software have a job's states there, as bits
    """

    schemes: tuple[Scheme, ...]
    placed: tuple[Knobs, ...]
    holders: NDArray[np.int64]

    @cached_property
    def keys(self) -> list[Knobs]:
        """Each of `placed` once."""
        return [*dict.fromkeys(self.placed)]

    @cached_property
    def of_key(self) -> NDArray[np.int64]:
        """Of each scheme, which of them it has."""
        at = {key: i for i, key in enumerate(self.keys)}
        return np.array([at[key] for key in self.placed], dtype=np.int64)

    @cached_property
    def states(self) -> list[Scheme]:
        """A scheme of each placement of states: wires take no memory."""
        return [*{placed[:-1]: s for placed, s in zip(self.placed, self.schemes, strict=True)}.values()]

    @cached_property
    def of_states(self) -> NDArray[np.int64]:
        """Of each scheme, which of them has its states."""
        at = {placement(scheme)[:-1]: i for i, scheme in enumerate(self.states)}
        return np.array([at[placed[:-1]] for placed in self.placed], dtype=np.int64)


def table(job: Workload, software: Sequence[Software], exact: bool) -> Table:
    """Of those under which some of the software has a job's states; of all, where it is none. On a machine
    with groups, of those that it without does not have."""
    found = []
    for scheme in (each for each in schemes(job.levels, exact) if is_new(each, job)):
        holds = sum(row.holds(scheme, job) << i for i, row in enumerate(software)) if software else 1
        if holds:
            found.append((scheme, placement(scheme), holds))
    first = {key[:-1]: i for i, (_, key, _) in reversed([*enumerate(found)])}
    found.sort(key=lambda each: (first[each[1][:-1]], each[1][-1]))
    of_all, placed, holders = zip(*found, strict=True) if found else ((), (), ())
    return Table(of_all, placed, np.array(holders, dtype=np.int64))


def placement(scheme: Scheme) -> Knobs:
    """What a limit goes by: the states' levels, and how many wires are lossy."""
    lossy = sum(scheme.wire(name) != "native" for name in WIRES)
    return (*(getattr(scheme, name) for name in KNOBS[:4]), lossy)
