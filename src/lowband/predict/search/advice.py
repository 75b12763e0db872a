"""Will it fit, how fast, and what would make it faster: one job, and the changes of it that are worth making.

A change is another micro-batch (with the same global batch, or a larger one), another recomputation, both, or
another named scheme; nothing that needs other machines. Of each kind
the one that takes the least memory within the model's error of the kind's fastest is offered. Cheapest first:
what costs only memory, then what changes the global batch, then what sends rounded values; among equals, what
takes the least memory.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lowband.cost.numbers import GIB
from lowband.errors import UserError
from lowband.predict.prediction import predict
from lowband.predict.search.candidates import MODEL_ERROR
from lowband.predict.workload import Workload
from lowband.spec.scheme import Scheme
from lowband.spec.step import Recompute

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
RECOMPUTE: tuple[Recompute, ...] = ("full", "none")
SHOWN = 3
LEAST_GAIN = 0.01
MOST_GPUS = 64  # times as many, of those that are tried where nothing else fits

Key = tuple[str, Recompute, int, int]  # scheme, recompute, micro-batch, accumulation


@dataclass(frozen=True)
class Outcome:
    """One point. tokens: per second and rank, with constants at their slow end, value and fast end.

    peak:   bytes per rank, the runtime included
    fits:   whether that is within the device's memory; true if its size is not known
    """

    tokens: tuple[float, float, float]
    peak: float
    fits: bool


@dataclass(frozen=True)
class Change:
    """A point that differs from the job asked about.

    gain:   tokens per second over the job's, less 1: least, predicted, most over the constants'
            intervals, and at least the model's error apart from the predicted
    memory: bytes per rank more than the job's
    costs:  what else it costs; empty: nothing
    """

    words: str
    point: Key
    outcome: Outcome
    gain: tuple[float, float, float]
    memory: float
    costs: str


def split(micro_batch: int, accumulation: int, wanted: int) -> int:
    """Passes of `wanted` sequences that keep the sequences per step; if none do, as many as before."""
    whole, rest = divmod(micro_batch * accumulation, wanted)
    return accumulation if rest else whole


class Advisor:
    """Every point around one job's machine, stack, model, ranks and sequence, predicted once."""

    def __init__(self, job: Workload, schemes: Sequence[Scheme], batches: Sequence[tuple[int, int]]) -> None:
        """job: any point; schemes: to try, already on the machine's levels; batches: (micro-batch, passes)"""
        self.job = job
        self.schemes = {scheme.name: scheme for scheme in schemes}
        self.found: dict[Key, Outcome] = {}
        micro, passes = (np.array(values) for values in zip(*batches, strict=True))
        for scheme in schemes:
            for recompute in RECOMPUTE:
                grid = replace(
                    job, scheme=scheme, recompute=recompute, micro_batch=micro, accumulation=passes
                )
                self.found |= {
                    (scheme.name, recompute, b, a): one
                    for (b, a), one in zip(batches, _outcomes(grid), strict=True)
                }

    def changes(self, point: Key) -> list[Change]:
        """The cheapest changes that make a job that fits faster; those that make one fit that does not."""
        base = self.found[point]
        if not base.fits:
            return self._to_fit(point)
        kinds: dict[str, list[Change]] = {}
        for kind, change in self._tried(point):
            if change.outcome.fits and change.gain[1] >= LEAST_GAIN and change.gain[0] > 0:
                kinds.setdefault(kind, []).append(change)
        best = {kind: _least_memory(changes) for kind, changes in kinds.items()}
        if "lossy" in best and best["lossy"].gain[1] <= MODEL_ERROR:
            del best["lossy"]
        if "both" in best:  # must gain more than either alone
            alone = [best[kind].gain[1] for kind in best if kind != "both"]
            if best["both"].gain[1] < max(alone, default=0) + LEAST_GAIN:
                del best["both"]
        return sorted(best.values(), key=_cost)[:SHOWN]

    def _tried(self, point: Key) -> Iterator[tuple[str, Change]]:
        """By kind, the points that differ in one choice, or in both micro-batch and recomputation."""
        scheme, recompute, micro, passes = point
        for other in RECOMPUTE:
            for wanted in dict.fromkeys((micro, *MICRO_BATCHES)):
                to = (scheme, other, wanted, split(micro, passes, wanted))
                if to == point:
                    continue
                same = wanted * to[3] == micro * passes
                kind = "micro-batch" if same else "larger batch"
                if other != recompute:
                    kind = "recompute" if wanted == micro else "both"
                yield kind, self._change(point, to)
        for name, placed in self.schemes.items():
            if name != scheme:
                kind = "lossy" if placed.is_quantized else "scheme"
                yield kind, self._change(point, (name, recompute, micro, passes))

    def _change(self, point: Key, to: Key) -> Change:
        base, found = self.found[point], self.found[to]
        ratios = sorted(new / old for new, old in zip(found.tokens, base.tokens, strict=True))
        ratio = found.tokens[1] / base.tokens[1]
        least, most = min(ratios[0], ratio / (1 + MODEL_ERROR)), max(ratios[2], ratio * (1 + MODEL_ERROR))
        gain = (least - 1, ratio - 1, most - 1)
        costs = []
        before, after = (each[2] * each[3] * self.job.levels.world for each in (point, to))
        if before != after:
            costs.append(f"global batch {after} instead of {before}")
        if self.schemes[to[0]].is_quantized and not self.schemes[point[0]].is_quantized:
            costs.append("rounded values on the links")
        return Change(_words(point, to), to, found, gain, found.peak - base.peak, "; ".join(costs))

    def _to_fit(self, point: Key) -> list[Change]:
        """Points that fit, without lossy wires: the fewest choices changed, then the fastest."""
        found = []
        for to, outcome in self.found.items():
            smaller = to[2] <= point[2] and to[3] == split(point[2], point[3], to[2])
            if outcome.fits and smaller and not self.schemes[to[0]].is_quantized:
                changed = sum(a != b for a, b in zip(point[:3], to[:3], strict=True))
                found.append((changed, -outcome.tokens[1], self._change(point, to)))
        found.sort(key=lambda one: one[:2])
        different = {change.outcome: change for _, _, change in reversed(found)}  # some schemes are one here
        return [change for _, _, change in found if different[change.outcome] is change][:SHOWN]

    def ranks_that_fit(self, point: Key) -> int | None:
        """The fewest of 2, 4, ..., 64 times the ranks on which it fits as it is; None: on none of them."""
        scheme, recompute, micro, passes = point
        factor = 2
        while factor <= MOST_GPUS:
            job = replace(
                self.job, ranks=factor * self.job.ranks, scheme=self.schemes[scheme], recompute=recompute,
                micro_batch=micro, accumulation=passes,
            )  # fmt: skip
            if predict(job, interval=False).fits:
                return job.ranks
            factor *= 2
        return None


def placed_schemes(job: Workload, schemes: Sequence[Scheme]) -> list[Scheme]:
    """Those of the schemes that the machine has levels for, after the job's own.

    Replicas that meet otherwise than the job's do not train the same way, so they are no change to advise.
    """
    found = {job.scheme.name: job.scheme}
    for scheme in schemes:
        if scheme.sync != job.scheme.sync:
            continue
        try:
            found.setdefault(scheme.name, scheme.on(list(job.machine.sizes)))
        except UserError:
            continue
    return list(found.values())


def _outcomes(grid: Workload) -> Iterator[Outcome]:
    p = predict(grid)
    shape = np.shape(grid.micro_batch)
    tokens = [
        np.broadcast_to(p.tokens_per_s_per_gpu * p.step_time_s / seconds, shape)
        for seconds in (p.step_time_slow_s, p.step_time_s, p.step_time_fast_s)
    ]
    fits = np.broadcast_to(True if p.fits is None else p.fits, shape)
    for i, peak in enumerate(np.broadcast_to(p.peak_memory_bytes, shape)):
        slow, value, fast = (float(rate[i]) for rate in tokens)
        yield Outcome((slow, value, fast), float(peak), bool(fits[i]))


def _least_memory(changes: Sequence[Change]) -> Change:
    fastest = max(change.gain[1] for change in changes)
    near = [c for c in changes if (1 + c.gain[1]) * (1 + MODEL_ERROR) >= 1 + fastest]
    return min(near, key=lambda change: (change.memory, -change.gain[1]))


def _cost(change: Change) -> tuple[int, float]:
    order = 2 if "rounded" in change.costs else 1 if change.costs else 0
    return order, change.memory


def _words(point: Key, to: Key) -> str:
    named = [f"scheme {to[0]}"] if to[0] != point[0] else []
    named += [f"recompute {to[1]}"] if to[1] != point[1] else []
    if to[2:] != point[2:]:
        named.append(f"micro-batch {to[2]}" + (f" x {to[3]}" if to[3] != point[3] else ""))
    return ", ".join(named)


def shown(changes: Sequence[Change]) -> list[dict[str, str]]:
    """The changes as the words that command and page print."""
    return [
        {
            "change": change.words,
            "tokens": f"{change.outcome.tokens[1]:.4g}",
            "gain": f"{100 * change.gain[1]:+.0f} %",
            "interval": f"{100 * change.gain[0]:+.0f} to {100 * change.gain[2]:+.0f} %",
            "memory": f"{change.memory / GIB:+.1f} GiB",
            "costs": change.costs or "nothing else",
        }
        for change in changes
    ]


def answer(row: Mapping[str, Any], room: str) -> dict[str, str]:
    """The first two answers as words, from a prediction's record (predict.render). room: whether it fits"""
    fast, slow = row["interval"]["step_time_s"]
    rate = row["tokens_per_s_per_gpu"]
    low, high = (rate * row["step_time_s"] / seconds for seconds in (slow, fast))
    runtime = row["runtime_bytes"] / GIB
    capacity = "" if row["capacity_bytes"] is None else f" of {row['capacity_bytes'] / GIB:g}"
    headroom = "" if row["fits"] is None else f", headroom {row['headroom_bytes'] / GIB:.1f} {room}"
    return {
        "fits": {None: "not known", True: "yes", False: "no"}[row["fits"]],
        "memory": f"{row['peak_memory_bytes'] / GIB:.1f}{capacity} GiB a GPU, {runtime:.1f} of them the "
        f"runtime{headroom}",
        "tokens": f"{rate:.4g} tokens/s a GPU ({low:.4g} to {high:.4g})",
        "step": f"{row['step_time_s']:.4g} s a step ({fast:.4g} to {slow:.4g})",
        "tflops": f"{row['tflops_per_gpu']:.4g} TFLOPS a GPU",
    }
