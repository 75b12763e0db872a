"""What a search finds: candidates by their choices, and what another value of each choice would cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowband.cost.numbers import GIB
from lowband.cost.tiers import Beyond
from lowband.predict.workload import Workload
from lowband.spec.axes import SHORT_ALL
from lowband.spec.step import STEP
from lowband.spec.wire import Wire

# The largest mean error of held-out rows of step times over all sources (docs/predictor-errors.md).
MODEL_ERROR = 0.075
SHOWN = 10  # placements of a plan

WIRES: dict[str, tuple[Wire, Wire]] = {row.name: ("native", row.coded) for row in STEP if row.coded}
MEMORY_KNOBS = (
    "weights", "secondary", "grads", "optim", "recompute", "recomputed", "beyond", "tensor", "context",
    "context_attention", "context_states", "expert", "route", "copies", "pipeline", "schedule", "chunks",
)  # fmt: skip
RELIEF = "recomputed", "beyond"  # are tried where memory is short
KNOBS = (*MEMORY_KNOBS[:4], *WIRES, "micro_batch", *MEMORY_KNOBS[4:])

Knobs = tuple[object, ...]  # in the order of KNOBS


@dataclass(frozen=True)
class Candidate:
    """One point of the search. short_by: bytes by which memory is too small; 0 if it fits. peak: bytes"""

    knobs: Knobs
    batches: Workload  # the job with all micro-batches, as arrays
    micro_batch: int
    accumulation: int
    step_time_s: float
    short_by: float
    peak: float = 0.0

    @property
    def job(self) -> Workload:
        return replace(self.batches, micro_batch=self.micro_batch, accumulation=self.accumulation)


def knobs_of(job: Workload, micro_batch: int) -> Knobs:
    """A job's choices. micro_batch: of one that has several as an array"""
    values: dict[str, Any] = vars(job.scheme) | vars(job) | vars(job.axes) | {"micro_batch": micro_batch}
    return tuple(values[name] for name in KNOBS)


def differ_in_one(a: Knobs, b: Knobs) -> bool:
    """Whether two candidates differ in one choice alone, and what depends on it."""
    a, b = _without_parts(a), _without_parts(b)
    first = next((i for i, (one, other) in enumerate(zip(a, b, strict=True)) if one != other), None)
    return first is not None and _differs_only(a, b, _free(first, KNOBS[first]))


def _without_parts(knobs: Knobs) -> Knobs:
    """A candidate's choices, without which parts of its states are beyond the device: that follows from the
    others."""
    at = KNOBS.index("beyond")
    beyond: Any = knobs[at]
    if beyond is None or beyond.offload is None:
        return knobs
    return *knobs[:at], replace(beyond, offload=None), *knobs[at + 1 :]


def _free(i: int, knob: str) -> range:
    """The choice and those after it that may differ with it: another degree may have other ways."""
    return range(
        i, i + 1 + {"recompute": 1, "context": 2, "expert": 2, "schedule": 1, "pipeline": 2}.get(knob, 0)
    )


def _differs_only(a: Knobs, b: Knobs, free: range) -> bool:
    """Whether two differ in the first of some choices, and else at most in the others of them."""
    end = free[-1] + 1
    return a[free[0]] != b[free[0]] and a[: free[0]] == b[: free[0]] and a[end:] == b[end:]


@dataclass(frozen=True)
class Plan:
    """ranked: candidates that fit, fastest first; candidates: those that were predicted, by their knobs.

    tried:    how many there are, with those that were left out because their computation alone takes longer
    left_out: what was not tried, and why, in one line
    around:   predicts those that differ from one in a single choice
    """

    ranked: list[Candidate]
    candidates: dict[Knobs, Candidate]
    left_out: str = ""
    tried: int = 0
    around: Callable[[Candidate], Mapping[Knobs, Candidate]] = lambda _: {}

    def reasons(self, best: Candidate) -> list[str]:
        """Per knob, a line with the cost of its next best value, all else equal."""
        found = {**self.candidates, **self.around(best)}
        candidates = [(_without_parts(key), candidate) for key, candidate in found.items()]
        own, lines = _without_parts(best.knobs), []
        for i, knob in enumerate(KNOBS):
            along = knob in ("context_attention", "context_states")
            if along and (best.knobs[KNOBS.index("context")] == 1 or best.knobs[i] == "auto"):
                continue
            is_routed, has_experts = knob in ("expert", "route", "copies"), best.job.model.experts is not None
            if is_routed and not (has_experts and (knob == "expert" or best.job.axes.expert > 1)):
                continue
            if knob == "copies" and best.job.imbalance == 1:
                continue
            if knob in RELIEF and best.knobs[i] == getattr(Workload, knob):
                continue
            free = _free(i, knob)
            others = [c for key, c in candidates if _differs_only(key, own, free)]
            name = {"beyond": "tiers"}.get(knob, SHORT_ALL.get(knob, knob))
            lines.append(f"{name} {in_words(best.knobs, knob)}: {_effect(best, i, others)}")
        return lines


def in_words(knobs: Knobs, knob: str) -> object:
    """A choice as texts have it."""
    value: Any = knobs[KNOBS.index(knob)]
    if knob == "beyond":
        return tiers_in_words(value)
    return recompute_in_words(value, knobs[KNOBS.index("recomputed")]) if knob == "recompute" else value


def recompute_in_words(kind: str, part: Any) -> str:
    return kind if part == 1 else f"{kind} of {100 * part:.3g} % of the layers"


def tiers_in_words(beyond: Beyond | None) -> str:
    if beyond is None:
        return "none"
    parts = (f"{name} {value:g}" if value is not True else name for name, value in beyond.parts.items())
    return " ".join([*(f"{state}@{tier}" for state, tier in beyond.places.items()), *parts])


def _effect(best: Candidate, i: int, others: Sequence[Candidate]) -> str:
    fitting = sorted((c for c in others if not c.short_by), key=lambda c: c.step_time_s)
    if fitting:
        slower = 100 * (fitting[0].step_time_s / best.step_time_s - 1)
        effect = f"{in_words(fitting[0].knobs, KNOBS[i])} would be {abs(slower):.1f} % "
        return effect + ("slower" if slower >= 0 else "faster, which is within the model's error")
    if others:
        least = min(others, key=lambda c: c.short_by)
        return f"{in_words(least.knobs, KNOBS[i])} does not fit: {least.short_by / GIB:.3g} GiB short"
    return "no other value was possible here"
