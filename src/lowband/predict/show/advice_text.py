"""`lowband advise`: one screen of text, or the same as an object."""

from collections.abc import Sequence
from typing import Any

from lowband.predict.prediction import predict
from lowband.predict.search.advice import MICRO_BATCHES as TRIED
from lowband.predict.search.advice import Advisor, Change, Key, answer, placed_schemes, shown, split
from lowband.predict.show.point_text import fits, no_evidence
from lowband.predict.show.record import record
from lowband.predict.workload import Workload
from lowband.spec.columns import aligned
from lowband.spec.scheme import Scheme

HEADINGS = {
    "change": "change", "tokens": "tokens/s a GPU", "gain": "gain", "interval": "interval",
    "memory": "memory", "costs": "costs besides",
}  # fmt: skip


def advise(job: Workload, schemes: Sequence[Scheme]) -> dict[str, Any]:
    """The answers for a job as plain data: its prediction, their words, and the changes. schemes: to try"""
    micro, passes = int(job.micro_batch), int(job.accumulation)
    batches = {(micro, passes), *((wanted, split(micro, passes, wanted)) for wanted in TRIED)}
    advisor = Advisor(job, placed_schemes(job, schemes), sorted(batches))
    point = (job.scheme.name, job.recompute, micro, passes)
    return answers(advisor, job, point)


def answers(advisor: Advisor, job: Workload, point: Key) -> dict[str, Any]:
    """The answers for one of the advisor's points; job: that point"""
    row = record(job, predict(job))
    changes = advisor.changes(point)
    words = answer(row, "" if row["fits"] is None else fits(row))
    return {
        "provenance": "predicted",
        "question": _question(job),
        "answer": words,
        "of_a_step": _shares(row),
        "heading": _heading(bool(row["fits"] is not False), changes),
        "changes": shown(changes),
        "ranks_that_fit": None if advisor.found[point].fits else advisor.ranks_that_fit(point),
        "stands_on": _stands_on(row),
        "prediction": row,
    }


def text(found: dict[str, Any]) -> str:
    """One screen."""
    words = found["answer"]
    lines = [
        *no_evidence(found["prediction"]), *found["question"], "",
        f"will it fit?  {words['fits']}: {words['memory']}",
        f"how fast?     {words['tokens']}, {words['step']}, {words['tflops']}",
        f"              of a step: {found['of_a_step']}", "",
        found["heading"],
    ]  # fmt: skip
    if found["changes"]:
        changes = ([one[key] for key in HEADINGS] for one in found["changes"])
        lines += [f"  {line}" for line in aligned([[*HEADINGS.values()], *changes])]
    if found["ranks_that_fit"]:
        lines.append(f"  it fits unchanged on {found['ranks_that_fit']} GPUs")
    return "\n".join(
        [*lines, "", found["stands_on"], "item by item: lowband predict; all placements: lowband plan"]
    )


def _question(job: Workload) -> list[str]:
    return [
        f"predicted: {job.model.name} ({job.model.parameters / 1e9:.3g} billion parameters) under "
        f"{job.scheme.name} on {job.ranks} GPUs of {job.machine.name}, stack {job.stack.name}",
        f"micro-batch {job.micro_batch} x {job.accumulation}, sequence {job.seq_len}, recompute "
        f"{job.recompute}, global batch {job.micro_batch * job.accumulation * job.levels.world}",
    ]


def _shares(row: dict[str, Any]) -> str:
    largest = sorted(row["time_s"].items(), key=lambda item: -item[1])[:4]
    return ", ".join(f"{name} {100 * t / row['step_time_s']:.0f} %" for name, t in largest if t)


def _heading(fits_now: bool, changes: Sequence[Change]) -> str:
    wanted = "faster" if fits_now else "fit"
    if not changes:
        return f"no micro-batch, recomputation or scheme makes it {wanted}"
    return f"what would make it {wanted}" + (", cheapest first" if fits_now else "")


def _stands_on(row: dict[str, Any]) -> str:
    kinds = [one["kind"] for one in row["constants"].values()]
    named = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    wide = ": the intervals are wide" if kinds.count("default") > len(kinds) / 2 else ""
    return f"constants: {named}{wide}"
