"""Many cases in few processes: one group for each number of ranks, forked again only after a failure.

Forking and importing cost more than a case. A case that hangs is ended by a timer in each rank. Results are
written case by case, so that the cases after a failed one still run.
"""

import faulthandler
import pickle
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist

from lowband.run.launch import RankFailure, TimeLimit
from lowband.run.on_ranks import on_ranks
from lowband.spec.axes import Axes
from tests.random.cases import Case
from tests.random.observed import Observed, differences, exact_sum
from tests.random.replicas import run_reference
from tests.random.sharded import ALONE, run_sharded, topology_of

AT_ONCE = 25  # cases of one fork
REFERENCE_S = 600.0  # for that many cases in one process


@dataclass(frozen=True)
class Outcome:
    """What became of a case."""

    case: Case
    wrong: str  # what is wrong, in one line; "" if nothing is
    largest: float  # difference of a loss or a weight
    seconds: float  # on the ranks
    exact: str = ""  # sum over all bits that the ranks have shown


def outcomes(cases: Sequence[Case], case_limit_s: float, axes: Axes = ALONE) -> Iterator[Outcome]:
    """Run cases, those of one number of ranks together; yields each as soon as it is known.

    case_limit_s: how long a case may take on the ranks until it counts as a hang
    axes:         beside data: each slice of the mesh runs the case on its ranks, and shows the same
    """
    for ranks, of_ranks in groupby(sorted(cases, key=lambda c: c.ranks), key=lambda c: c.ranks):
        these = list(of_ranks)
        for first in range(0, len(these), AT_ONCE):
            yield from _together(ranks, these[first : first + AT_ONCE], case_limit_s, axes)


def _together(ranks: int, cases: list[Case], case_limit_s: float, axes: Axes) -> Iterator[Outcome]:
    of_job = ranks * axes.tensor * axes.pipeline
    [expected] = on_ranks(1, _references, cases, time_limit_s=REFERENCE_S)
    with tempfile.TemporaryDirectory() as folder:
        left = list(zip(cases, expected, strict=True))
        while left:
            cause = _attempt(of_job, [case for case, _ in left], Path(folder), case_limit_s, axes)
            for done, (case, reference) in enumerate(left):
                files = [_file(Path(folder), case, rank) for rank in range(of_job)]
                if not all(file.exists() for file in files):
                    yield Outcome(case, _stacks(files) or cause, 0.0, 0.0)
                    left = left[done + 1 :]
                    break
                results = [pickle.loads(file.read_bytes()) for file in files]
                slices = {slice_: [results[rank][0] for rank in slice_] for *_, slice_ in results}
                seen, *others = slices.values()
                wrong, largest = differences(case, seen, reference)
                exact, seconds = exact_sum(seen), max(seconds for _, seconds, _ in results)
                wrong += ["slices of the mesh differ"] if {exact} != {exact, *map(exact_sum, others)} else []
                yield Outcome(case, "; ".join(wrong[:3]), largest, seconds, exact)
            else:
                left = []


def _attempt(ranks: int, cases: list[Case], folder: Path, case_limit_s: float, axes: Axes) -> str:
    """Run the cases until one raises or hangs; the cause."""
    try:
        limit_s = case_limit_s * (len(cases) + 1)
        on_ranks(ranks, _on_rank, cases, folder, case_limit_s, axes, time_limit_s=limit_s)
    except RankFailure as failure:
        return str(failure)
    except TimeLimit:
        return "time limit"
    return "no result"


def _on_rank(cases: list[Case], folder: Path, case_limit_s: float, axes: Axes) -> None:
    warnings.filterwarnings(
        "ignore", "None of the inputs have requires_grad"
    )  # evaluating checkpointed layers
    for case in cases:
        file = _file(folder, case, dist.get_rank())
        with file.with_suffix(".stacks").open("w") as stacks:
            faulthandler.dump_traceback_later(case_limit_s, exit=True, file=stacks)
            start = time.perf_counter()
            observed = run_sharded(case, axes)
            faulthandler.cancel_dump_traceback_later()
        partial = file.with_suffix(".partial")
        slice_ = topology_of(case.inner, axes).along("data").ranks
        partial.write_bytes(pickle.dumps((observed, time.perf_counter() - start, slice_)))
        partial.rename(file)  # whole or not there


def _stacks(files: Sequence[Path]) -> str:
    """Where the threads of the first rank that hung were, in one line; "" if none did."""
    for rank, file in enumerate(files):
        stacks = file.with_suffix(".stacks")
        lines = stacks.read_text(encoding="utf-8").splitlines() if stacks.exists() else []
        if lines:
            print("\n".join(lines), file=sys.stderr)
            frames = [line.split(" in ")[-1] for line in lines if line.startswith("  File")]
            return f"rank {rank} hung, innermost frames first: {' '.join(frames[:30])}"
    return ""


def _references(cases: list[Case]) -> list[list[Observed]]:
    warnings.filterwarnings("ignore", "None of the inputs have requires_grad")
    torch.set_num_threads(1)
    return [run_reference(case) for case in cases]


def _file(folder: Path, case: Case, rank: int) -> Path:
    return folder / f"{case.seed}-{rank}"
