"""Which of a plan's candidates are shown: one per placement, with lossy wires only where they pay."""

from collections.abc import Sequence

from lowband.cost.numbers import GIB
from lowband.predict.room import surely
from lowband.predict.search.candidates import KNOBS, MODEL_ERROR, SHOWN, WIRES, Candidate, Plan
from lowband.spec.wire import WIRE_BITS

STATES = KNOBS[:4]  # weights, secondary, grads, optim


def order(candidate: Candidate) -> tuple[object, ...]:
    """The fastest first; of equally fast ones that with the lowest peak; of those always the same."""
    return candidate.step_time_s, candidate.peak, *map(str, candidate.knobs)


def lossy_wires(candidate: Candidate) -> int:
    """How many collectives send rounded values."""
    scheme = candidate.batches.scheme
    return sum(scheme.wire(name) in WIRE_BITS for name in WIRES)


def fits_surely(candidate: Candidate) -> bool:
    """Whether it fits at the upper end of the memory model's interval, too."""
    memory_gib = candidate.batches.machine.device.memory_gib
    return memory_gib is None or bool(surely(candidate.batches.machine, candidate.peak) <= memory_gib * GIB)


def chosen(plan: Plan, error: float = MODEL_ERROR) -> list[Candidate]:
    """The best candidate of each of the ten fastest placements, fastest first.

    A further lossy wire is taken only if it makes the step faster by more than `error`; and a placement has
    lossy wires only if they make it faster, by more than that, than the fastest candidate without any.
    Of candidates as fast within `error` the fastest is taken that surely fits, where one does; so the first
    row is not one that may run out of memory if another is as fast.
    """
    placements: dict[tuple[object, ...], list[Candidate]] = {}
    for candidate in plan.ranked:
        placements.setdefault(candidate.knobs[: len(STATES)], []).append(candidate)
    exact = next((one for one in plan.ranked if not lossy_wires(one)), None)
    best = []
    for candidates in placements.values():
        one = _worthwhile(candidates, error)
        if lossy_wires(one) and exact is not None and not _beats(one, exact, error):
            if (own := next((each for each in candidates if not lossy_wires(each)), None)) is None:
                continue  # a search left it out: slower than all that are shown
            one = own
        best.append(_safe([each for each in candidates if lossy_wires(each) == lossy_wires(one)], one, error))
    ordered = sorted(best, key=order)
    first = _safe(ordered, ordered[0], error)
    return [first, *(one for one in ordered if one is not first)][:SHOWN]


def _safe(candidates: Sequence[Candidate], fastest: Candidate, error: float) -> Candidate:
    """The fastest of those that surely fit and are as fast within the error, or the fastest."""
    alike = (one for one in candidates if not _beats(fastest, one, error) and fits_surely(one))
    return next(alike, fastest)


def _worthwhile(candidates: Sequence[Candidate], error: float) -> Candidate:
    """Of candidates, fastest first: starts without lossy wires, and adds one as long as that pays."""
    by_count: dict[int, Candidate] = {}
    for candidate in candidates:
        by_count.setdefault(lossy_wires(candidate), candidate)
    best = by_count[min(by_count)]  # wires take no memory: in a whole search one without lossy wires fits too
    for count in sorted(by_count):
        if _beats(by_count[count], best, error):
            best = by_count[count]
    return best


def _beats(one: Candidate, other: Candidate, error: float) -> bool:
    return one.step_time_s * (1 + error) < other.step_time_s
