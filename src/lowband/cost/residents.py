"""Which chunks stay in a fast memory between their accesses, decided access by access.

A step accesses chunks in the order of the step before it (PatrickStar, arXiv 2108.05818, whose warm-up step
writes it down). So of what is there and what is accessed that leaves which is needed again last (Belady
1966); unlike in cost.eviction what is accessed need not stay. A chunk that gets new values in each step
(weights) comes with them, for nothing, and is of no use from its last access to then. Until a step has been
seen, and where one goes another way, nothing leaves for another's sake.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

NEVER = 2**62
LONGEST = 2**16  # accesses of a step that are written down
STEADY = 4  # steps after which every one moves as much

Chunk = TypeVar("Chunk", bound=Hashable)


@dataclass(frozen=True)
class Found(Generic[Chunk]):
    """was_there: no fetch; stays: behind the access; left: what has left for its sake"""

    was_there: bool
    stays: bool
    left: tuple[Chunk, ...] = ()


class Residents(Generic[Chunk]):
    """What is in the fast memory. A step begins with a chunk that comes with new values again."""

    def __init__(self, capacity: int) -> None:
        """capacity: of the fast memory, in the unit of chunks' sizes"""
        self.capacity = capacity
        self._sizes: dict[Chunk, int] = {}  # of those that are there
        self._needed: dict[Chunk, int] = {}  # when they are accessed next, by place in the step
        self._seen: list[tuple[Chunk, bool]] = []  # in this step, and whether with new values
        self._new: set[Chunk] = set()  # of these
        self._order: list[tuple[Chunk, bool]] = []  # in the one before
        self._next: list[int] = []  # by place in that
        self._follows = False  # whether this step is as the one before, so far

    def access(self, chunk: Chunk, size: int, is_new: bool) -> Found[Chunk]:
        """is_new: it comes with new values"""
        is_first = chunk in self._new or (not self._new and bool(self._seen))
        if (is_new and is_first) or len(self._seen) == LONGEST:
            self._begin_step()
        if is_new:
            self._new.add(chunk)
        place = len(self._seen)
        self._seen.append((chunk, is_new))
        self._follows &= place < len(self._order) and self._order[place][0] == chunk
        was_there = chunk in self._sizes and not is_new
        needed = self._next[place] if self._follows else place
        self._sizes.pop(chunk, None)
        self._needed.pop(chunk, None)
        left, used = list[Chunk](), sum(self._sizes.values())
        if self._follows and used + size > self.capacity:
            for later in sorted(self._needed, key=self._needed.__getitem__, reverse=True):
                if used + size <= self.capacity or self._needed[later] <= needed:
                    break
                used -= self._sizes[later]
                left.append(later)
        if needed == NEVER or used + size > self.capacity:
            return Found(was_there, stays=False)
        for later in left:
            del self._sizes[later], self._needed[later]
        self._sizes[chunk], self._needed[chunk] = size, needed
        return Found(was_there, True, tuple(left))

    def _begin_step(self) -> None:
        self._new = set()
        self._order, self._seen, self._follows = self._seen, [], bool(self._seen)
        first: dict[Chunk, int] = {}  # use of what a chunk has at the beginning of a step
        for place, (chunk, is_new) in reversed([*enumerate(self._order)]):
            first[chunk] = NEVER if is_new else place
        self._needed = {chunk: first.get(chunk, NEVER) for chunk in self._sizes}
        following = {chunk: min(NEVER, len(self._order) + place) for chunk, place in first.items()}
        self._next = [0] * len(self._order)
        for place, (chunk, is_new) in reversed([*enumerate(self._order)]):
            self._next[place], following[chunk] = following[chunk], NEVER if is_new else place


Access = Literal["new", "forward", "backward"]


def step_order(forwards: Sequence[int], backwards: Sequence[int]) -> list[tuple[int, Access]]:
    """Accesses of a step to its units, which the first forward brings new weights.

    forwards, backwards: by unit, the root's first, how often it is gathered forward, and backward
    """
    units = range(len(forwards))
    found = list[tuple[int, Access]]()
    for number in range(max([*forwards, *backwards])):
        found += [(unit, "forward" if number else "new") for unit in units if number < forwards[unit]]
        found += [(unit, "backward") for unit in reversed(units) if number < backwards[unit]]
    return found


def fetched(order: Sequence[tuple[int, Access]], sizes: Sequence[int], capacity: int) -> Counter[Access]:
    """What a steady step fetches, by kind of access. sizes: by unit; capacity: of the fast memory"""
    residents, found = Residents[int](capacity), Counter[Access]()
    for _ in range(STEADY):
        found.clear()
        for unit, access in order:
            is_there = residents.access(unit, sizes[unit], access == "new").was_there
            if not is_there and access != "new":
                found[access] += sizes[unit]
    return found
