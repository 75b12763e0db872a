"""One micro-step of sequences of many lengths, solved by `scipy.optimize.milp`, in one of two forms:

    exact      integers: sequences of each length on each place; the busiest rank's seconds are the objective.
               For at most EXACT sequences
    by degree  integers: sequences of each bucket of lengths in each degree, and groups of each degree; the
               objective is the seconds of all ranks together, within a time M. Its sequences are placed, the
               longest first, on the block that is free first; M grows by RISE until they end in time

A place is an aligned block of 1, 2, 4, ... ranks (search/lengths.py).
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

EXACT = 8  # sequences up to which places are told apart, if places x sequences are its square at most
BUCKETS = 12  # of lengths; FlexSP's solver has 16
RISE, RISES = 1.05, 60  # of M, and how often at most
NEAR = 1e-9  # relative: what counts as equal


@dataclass(frozen=True)
class Costs:
    """What a sequence costs on places of each degree.

    seconds: degree -> lengths in tokens (an array, int64) to seconds on each rank of a place (fp64)
    room:    tokens that a rank has memory for in a micro-step; a sequence takes length / degree of each rank
    fixed_s: seconds of a micro-step whatever is in it
    way:     how a sequence of this length and degree is exchanged, in words
    """

    seconds: Mapping[int, Callable[[NDArray[np.int64]], NDArray[np.float64]]]
    room: float
    fixed_s: float = 0.0
    way: Callable[[int, int], str] = field(default=lambda _length, _degree: "")


@dataclass(frozen=True)
class Placed:
    """A sequence of `length` tokens on ranks `first` to `first + degree - 1`, for `seconds` on each."""

    length: int
    degree: int
    first: int
    seconds: float


@dataclass(frozen=True)
class MicroStep:
    """Sequences that are computed between two accumulations; integers: of the largest milp behind it."""

    placed: list[Placed]
    seconds: float
    integers: int


def micro_step(
    lengths: Sequence[int],
    ranks: int,
    costs: Costs,
    degrees: Sequence[int],
    zones: bool,
    before: float = np.inf,
) -> MicroStep | None:
    """One micro-step; None if no place was found for one of its sequences, or none in time.

    before: seconds in which it must end to be of use
    """
    places = [(degree, first) for degree in degrees for first in range(0, ranks, degree)]
    if len(lengths) <= EXACT and len(places) * len(lengths) <= EXACT**2:
        return _exact(lengths, ranks, costs, places, zones)
    return _by_degree(lengths, ranks, costs, degrees, zones, before)


def _exact(
    lengths: Sequence[int], ranks: int, costs: Costs, places: Sequence[tuple[int, int]], zones: bool
) -> MicroStep | None:
    of_length = Counter(lengths)
    known = np.array(sorted(of_length, reverse=True))
    counts = np.array([of_length[int(length)] for length in known])
    kinds, own = len(known), 0 if zones else len(places)
    size = len(places) * kinds + own + 1  # sequences by place and length, whether a place is used, seconds
    each = {degree: costs.seconds[degree](known) for degree, _ in places}
    most = np.array([counts * (known <= d * costs.room * (1 + NEAR)) for d, _ in places]).ravel()
    rows, low, high = list[NDArray[np.float64]](), list[float](), list[float]()

    def add(values: Mapping[int, NDArray[np.float64] | float], least: float, largest: float) -> None:
        row = np.zeros(size)
        for at, value in values.items():
            row[at : at + np.size(value)] = value
        rows.append(row)
        low.append(least)
        high.append(largest)

    for kind, count in enumerate(counts):
        add({place * kinds + kind: 1.0 for place in range(len(places))}, count, count)
    for rank in range(ranks):
        over = [i for i, (degree, first) in enumerate(places) if first <= rank < first + degree]
        busy = {i * kinds: each[places[i][0]] for i in over}
        add({**busy, size - 1: -1.0}, -np.inf, 0)
        add({i * kinds: known / places[i][0] for i in over}, 0, costs.room)
        if not zones:
            add({len(places) * kinds + i: 1.0 for i in over}, 0, 1)
    for place in range(own):
        add({place * kinds: np.ones(kinds), len(places) * kinds + place: -float(len(lengths))}, -np.inf, 0)
    from scipy.optimize import Bounds, LinearConstraint, milp  # not where only tables are read

    found = milp(
        np.eye(size)[-1],
        constraints=LinearConstraint(np.array(rows), np.array(low), np.array(high)),
        bounds=Bounds(0, np.concatenate([most, np.ones(own), [np.inf]])),
        integrality=np.append(np.ones(size - 1), 0),
        options={"mip_rel_gap": 0},
    )
    if found.x is None:
        return None
    number = np.round(found.x[: len(places) * kinds]).astype(int).reshape(len(places), kinds)
    placed = [
        Placed(int(length), degree, first, float(each[degree][kind]))
        for (degree, first), row in zip(places, number, strict=True)
        for kind, length in enumerate(known)
        for _ in range(row[kind])
    ]
    return MicroStep(sorted(placed, key=lambda one: -one.length), busiest(placed, ranks), size - 1)


def busiest(placed: Sequence[Placed], ranks: int) -> float:
    """Seconds of the rank that computes longest."""
    load = np.zeros(ranks)
    for one in placed:
        load[one.first : one.first + one.degree] += one.seconds
    return float(load.max())


def buckets(lengths: Sequence[int]) -> list[list[int]]:
    """The lengths, the longest first, in at most BUCKETS runs whose ends are in equal ratios."""
    ordered = sorted(lengths, reverse=True)
    ratio = (ordered[-1] / ordered[0]) ** (1 / BUCKETS)
    ends = [0, *(sum(n > ordered[0] * ratio**i for n in ordered) for i in range(1, BUCKETS)), len(ordered)]
    return [ordered[a:b] for a, b in pairwise(ends) if b > a]


def _by_degree(
    lengths: Sequence[int], ranks: int, costs: Costs, degrees: Sequence[int], zones: bool, before: float
) -> MicroStep | None:
    runs = buckets(lengths)
    middle = np.array([round(sum(run) / len(run)) for run in runs])  # of a bucket, for its sums
    longest = np.array([run[0] for run in runs])
    counts, width = np.array([len(run) for run in runs]), np.array(degrees)
    each = np.array([costs.seconds[d](middle) for d in degrees])
    alone = np.array([costs.seconds[d](longest) for d in degrees])
    fits = longest <= width[:, None] * costs.room * (1 + NEAR)
    # No plan is faster: all ranks share the least work; and each sequence takes its time.
    least = np.min(np.where(fits, width[:, None] * each, np.inf), axis=0)
    until = max(
        float((least * counts).sum() / ranks), float(np.min(np.where(fits, alone, np.inf), axis=0).max())
    )
    best, integers, room = None, 0, min(costs.room, float(sum(lengths)))  # no limit is none in an equation
    for _ in range(RISES):
        if until >= before:
            break
        possible = fits & (alone <= until * (1 + NEAR))
        numbers, groups = _numbers(middle, counts, width, each, possible, until, ranks, room, zones)
        integers = max(integers, numbers.size + (0 if zones else len(degrees)))
        if numbers.sum() == len(lengths):
            placed = _place(runs, numbers, groups, ranks, costs, degrees, zones)
            time = np.inf if placed is None else busiest(placed, ranks)
            if placed is not None and (best is None or time < best.seconds):
                best = MicroStep(placed, time, integers)
            if best is not None and best.seconds <= until * RISE:
                break
        until *= RISE
    return best


def _numbers(
    length: NDArray[np.int64],
    counts: NDArray[np.int64],
    width: NDArray[np.int64],
    each: NDArray[np.float64],
    possible: NDArray[np.bool_],
    until: float,
    ranks: int,
    room: float,
    zones: bool,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many sequences of each bucket go to each degree, and its groups; zeros if `until` is too soon."""
    degrees, kinds = each.shape
    size = degrees * kinds + degrees
    work = width[:, None] * each
    rows = [np.concatenate([np.tile(np.eye(kinds)[k], degrees), np.zeros(degrees)]) for k in range(kinds)]
    low, high = [*map(float, counts)], [*map(float, counts)]
    sums = ((work, until), (np.broadcast_to(length, each.shape), room))
    shared = range(1) if zones else range(degrees)
    for values, most in sums:
        for one in shared:
            row = np.zeros(size)
            mine = slice(None) if zones else slice(one, one + 1)
            row[: degrees * kinds].reshape(degrees, kinds)[mine] = values[mine]
            if not zones:
                row[degrees * kinds + one] = -most * width[one]
            rows.append(row)
            low.append(-np.inf)
            high.append(most * ranks if zones else 0)
    rows.append(np.concatenate([np.zeros(degrees * kinds), width]))
    low.append(0)
    high.append(ranks)
    # Ranks that no group has are of no use: the rest of them, too, goes to groups.
    unused = -1e-6 * float(work.max()) * width * (0 if zones else 1)
    from scipy.optimize import Bounds, LinearConstraint, milp  # not where only tables are read

    found = milp(
        np.concatenate([work.ravel(), unused]),
        constraints=LinearConstraint(np.array(rows), np.array(low), np.array(high)),
        bounds=Bounds(0, np.concatenate([(possible * counts).ravel(), ranks // width])),
        integrality=np.ones(size),
        options={"mip_rel_gap": 0.01, "node_limit": 200},
    )
    if found.x is None:
        return np.zeros((degrees, kinds), dtype=np.int64), np.zeros(degrees, dtype=np.int64)
    whole = np.round(found.x).astype(np.int64)
    return whole[: degrees * kinds].reshape(degrees, kinds), whole[degrees * kinds :]


def _place(
    runs: Sequence[Sequence[int]],
    numbers: NDArray[np.int64],
    groups: NDArray[np.int64],
    ranks: int,
    costs: Costs,
    degrees: Sequence[int],
    zones: bool,
) -> list[Placed] | None:
    """Places for the sequences, widest and longest first, each where it ends first; None without room."""
    wide = sorted(range(len(degrees)), key=lambda i: -degrees[i])
    firsts, start = dict[int, range](), 0
    for i in wide:
        end = ranks if zones else start + int(groups[i]) * degrees[i]
        firsts[i] = range(0 if zones else start, end, degrees[i])
        start = end
    taken = {i: list[int]() for i in wide}
    for k, run in enumerate(runs):  # of a bucket the longest go to the most ranks
        at = 0
        for i in wide:
            taken[i] += run[at : at + numbers[i, k]]
            at += numbers[i, k]
    busy, held = np.zeros(ranks), np.zeros(ranks)
    placed = []
    for i in wide:
        degree = degrees[i]
        seconds = costs.seconds[degree](np.array(taken[i], dtype=np.int64))
        for length, time in sorted(zip(taken[i], seconds, strict=True), key=lambda one: -one[1]):
            free = [
                f for f in firsts[i]
                if held[f : f + degree].max() + length / degree <= costs.room * (1 + NEAR)
            ]  # fmt: skip
            if not free:
                return None
            first = min(free, key=lambda f: busy[f : f + degree].max())
            busy[first : first + degree] += time
            held[first : first + degree] += length / degree
            placed.append(Placed(length, degree, first, float(time)))
    return placed
