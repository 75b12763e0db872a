"""Which chunk leaves a full memory: by next use, in a step whose accesses are known (PatrickStar).

A warm-up step writes down in which order chunks are accessed; every later step has the same order
(PatrickStar, arXiv 2108.05818). So the chunk to evict is the one that is needed again last (Belady 1966): for
chunks of one size and without writing back no order of evictions fetches less. With sizes that differ, or
where a chunk that was written must be copied back before it leaves, it is a rule of thumb; `optimum` is the
least that any rule can move, as a mixed-integer program:

    for each two accesses that follow each other to one chunk   keep = 1: it stays in between
    at each access     the chunk itself, and those that stay around it, fit
    dirty              after an access that writes, or if the chunk stayed and was dirty before
    cost               size of a chunk for each access before which it did not stay, and again for each after
                       which it leaves dirty, or the step ends

Swaps of a task graph, in accesses to layers on a memory that holds one (Harmony, arXiv 2202.01306): virtual
memory runs m micro-batches one after the other, then the update, and copies whatever leaves; grouped runs
all micro-batches of a layer before the next one, drops what is clean, and updates a layer right after its
backward. With L layers a rank swaps in and out

    virtual    (4 m + 2) L - 4 m
    grouped    3 L - 1
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import numpy as np

from lowband.errors import UserError

Rule = Literal["next use", "least recent", "first in"]
RULES: tuple[Rule, ...] = ("next use", "least recent", "first in")
NEVER = 2**62


@dataclass(frozen=True)
class Access:
    """One access of a step to a chunk; writes: what it held before is out of date elsewhere."""

    chunk: str
    writes: bool = False


@dataclass(frozen=True)
class Moved:
    """Of a step: chunks that were fetched, and bytes that came and went."""

    fetches: int
    fetched: int
    written: int

    @property
    def total(self) -> int:
        return self.fetched + self.written


def order_of_step(units: Sequence[str]) -> list[Access]:
    """Accesses of a step with recomputation: forward through all units, and back, where each is written."""
    return [*(Access(unit) for unit in units), *(Access(unit, True) for unit in reversed(units))]


def moved(
    order: Sequence[Access], sizes: Mapping[str, int], capacity: int, rule: Rule = "next use", steps: int = 1
) -> Moved:
    """What moves in the last of `steps` steps, if each that does not fit makes others leave by the rule.

    The memory is empty at first; before the last step it holds what the one before has left, and after it, if
    there is only one, all that is dirty is written back. sizes, capacity: bytes. Raises UserError for a chunk
    that is larger than the memory.
    """
    if (most := max(sizes[access.chunk] for access in order)) > capacity:
        raise UserError(f"a chunk of {most:,} bytes", allowed=f"{capacity:,} at most: it must fit the memory")
    whole = [*order] * steps
    later = _next_uses(whole)
    held: dict[str, int] = {}  # chunk -> by what the rule orders it
    dirty: set[str] = set()
    fetches = fetched = written = used = 0
    for i, access in enumerate(whole):
        if i == len(whole) - len(order):
            fetches = fetched = written = 0
        chunk = access.chunk
        if chunk not in held:
            while used + sizes[chunk] > capacity:
                leaves = (max if rule == "next use" else min)(held, key=held.__getitem__)
                del held[leaves]
                used -= sizes[leaves]
                if leaves in dirty:
                    dirty.remove(leaves)
                    written += sizes[leaves]
            fetches, fetched, used = fetches + 1, fetched + sizes[chunk], used + sizes[chunk]
            held[chunk] = i
        if rule != "first in":
            held[chunk] = later[i] if rule == "next use" else i
        if access.writes:
            dirty.add(chunk)
    if steps == 1:
        written += sum(sizes[chunk] for chunk in dirty)
    return Moved(fetches, fetched, written)


def _next_uses(order: Sequence[Access]) -> list[int]:
    """For each access, when its chunk is accessed next."""
    found, seen = [NEVER] * len(order), dict[str, int]()
    for i in range(len(order) - 1, -1, -1):
        found[i] = seen.get(order[i].chunk, NEVER)
        seen[order[i].chunk] = i
    return found


def optimum(order: Sequence[Access], sizes: Mapping[str, int], capacity: int) -> int:
    """The least bytes that a step can move, from an empty memory, with all that is dirty written back."""
    before: dict[int, int] = {}  # access -> the one before it to the same chunk
    seen: dict[str, int] = {}
    for i, access in enumerate(order):
        if access.chunk in seen:
            before[i] = seen[access.chunk]
        seen[access.chunk] = i
    n = len(order)  # variables: keep, dirty and leaves of each access; keep: since the one before
    keep, dirty, leaves = range(n), range(n, 2 * n), range(2 * n, 3 * n)
    size = np.array([sizes[access.chunk] for access in order], float)
    after = {one: i for i, one in before.items()}
    rows, most = [], []

    def at_most(terms: Mapping[int, float], bound: float) -> None:
        row = np.zeros(3 * n)
        for variable, factor in terms.items():
            row[variable] = factor
        rows.append(row)
        most.append(bound)

    for t in range(n):
        around = {keep[i]: size[i] for i, j in before.items() if j < t < i}
        at_most(around, capacity - size[t])
        stays = {keep[after[t]]: -1.0} if t in after else {}
        at_most({dirty[t]: 1.0, leaves[t]: -1.0, **stays}, 0.0)  # dirty and does not stay: written back
        if t in before:
            at_most({dirty[before[t]]: 1.0, keep[t]: 1.0, dirty[t]: -1.0}, 1.0)
    low, high = np.zeros(3 * n), np.ones(3 * n)
    for t, access in enumerate(order):
        low[dirty[t]] = float(access.writes)
        high[keep[t]] = float(t in before)
    cost = np.concatenate([-size, np.zeros(n), size])
    from scipy.optimize import Bounds, LinearConstraint, milp  # not where only tables are read

    found = milp(
        cost, constraints=LinearConstraint(np.array(rows), ub=np.array(most)), bounds=Bounds(low, high),
        integrality=np.ones(3 * n),
    )  # fmt: skip
    assert found.x is not None, found.message
    return round(float(size.sum() + found.fun))


def swaps_virtual(layers: int, micro_batches: int) -> int:
    """Layers that a rank swaps in and out in a step, in the order of virtual memory."""
    return (4 * micro_batches + 2) * layers - 4 * micro_batches


def swaps_grouped(layers: int) -> int:
    """The same where micro-batches are grouped by layer."""
    return 3 * layers - 1


def virtual_order(layers: int, micro_batches: int) -> list[int]:
    """Layers in the order of virtual memory: each micro-batch forward and back, then the update."""
    forward = [*range(layers)]
    return (forward + forward[::-1]) * micro_batches + forward


def counted_swaps(order: Sequence[int], written: int | None = None) -> int:
    """Swaps of a memory that holds one layer. written: how many are copied when they leave; None: all"""
    fetches = 1 + sum(one != other for one, other in pairwise(order))
    return fetches + (fetches if written is None else written)
