"""Which of a plan's candidates are shown: one per placement, with lossy wires only where they pay."""

from collections.abc import Sequence

from lowband.predict.search.plan import KNOBS, WIRES, Candidate, Plan
from lowband.spec.wire import WIRE_BITS

# The largest mean error of held-out rows of step times over all sources on which constants were fitted
# (docs/predictor-errors.md).
MODEL_ERROR = 0.075

STATES = KNOBS[:4]  # weights, secondary, grads, optim


def lossy_wires(candidate: Candidate) -> int:
    """How many collectives send rounded values."""
    scheme = candidate.batches.scheme
    return sum(scheme.wire(name) in WIRE_BITS for name in WIRES)


def chosen(plan: Plan, error: float = MODEL_ERROR) -> list[Candidate]:
    """The best candidate of each placement, fastest first.

    A further lossy wire is taken only if it makes the step faster by more than `error`; and a placement has
    lossy wires only if they make it faster, by more than that, than the fastest candidate without any.
    """
    placements: dict[tuple[object, ...], list[Candidate]] = {}
    for candidate in plan.ranked:
        placements.setdefault(candidate.knobs[: len(STATES)], []).append(candidate)
    exact = next((one for one in plan.ranked if not lossy_wires(one)), None)
    best = []
    for candidates in placements.values():
        one = _worthwhile(candidates, error)
        if lossy_wires(one) and exact is not None and not _beats(one, exact, error):
            one = next(candidate for candidate in candidates if not lossy_wires(candidate))
        best.append(one)
    return sorted(best, key=lambda candidate: candidate.step_time_s)


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
