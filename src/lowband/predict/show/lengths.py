"""`lowband plan --lengths`: the fastest plan of a batch beside one degree for all, zone by zone."""

from collections.abc import Sequence
from typing import Any

from lowband.predict.search.lengths import LengthPlan, best_of_one_degree, fastest
from lowband.predict.search.lengths_cost import Job


def rows(batch: Sequence[int], job: Job) -> list[dict[str, Any]]:
    """A row for each degree, micro-step and way of the fastest plan; then one for the best single degree.

    Raises UserError for a sequence that fits nowhere.
    """
    costs, degrees = job.costs(), job.degrees
    best = fastest(batch, job.ranks, costs, degrees)
    one = best_of_one_degree(batch, job.ranks, costs, degrees)
    return [row for name, plan in (("fastest", best), ("one degree", one)) for row in _of(name, plan, job)]


def _of(name: str, plan: LengthPlan, job: Job) -> list[dict[str, Any]]:
    inside: dict[tuple[int, int, str], list[int]] = {}
    for number, step in enumerate(plan.steps, start=1):
        for one in step.placed:
            way = job.known[one.degree, one.length][1] if one.degree > 1 else ""
            inside.setdefault((number, one.degree, way), []).append(one.length)
    return [
        {
            "plan": name, "recompute": job.recompute, "micro_step": number, "ranks_each": degree,
            "zone": job.zone(degree), "way": way, "sequences": len(lengths),
            "shortest": min(lengths), "longest": max(lengths),
            "micro_step_s": plan.steps[number - 1].seconds, "step_s": plan.seconds,
        }
        for (number, degree, way), lengths in sorted(inside.items())
    ]  # fmt: skip


def report(batch: Sequence[int], found: Sequence[dict[str, Any]]) -> str:
    """The rows of the fastest plan as a short table, and what one degree for all would cost."""
    best = [row for row in found if row["plan"] == "fastest"]
    other = next(row for row in found if row["plan"] == "one degree")
    head = f"{'micro-step':>10} {'ranks each':>10} {'zone':<8} {'way':<24} {'sequences':>9}  lengths"
    lines = [
        f"{row['micro_step']:>10} {row['ranks_each']:>10} {row['zone']:<8} {row['way']:<24} "
        f"{row['sequences']:>9}  {row['shortest']} to {row['longest']}"
        for row in best
    ]
    times = f"{best[0]['step_s']:.4g} s; {other['ranks_each']} ranks each for all: {other['step_s']:.4g} s"
    count, recompute = best[-1]["micro_step"], best[0]["recompute"]
    total = (
        f"{len(batch)} sequences, {sum(batch)} tokens, {count} micro-steps, recompute {recompute}: {times}"
    )
    return "\n".join(["predicted, without the optimizer", total, head, *lines])
