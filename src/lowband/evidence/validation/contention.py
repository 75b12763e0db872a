"""Collectives in closed form against SimGrid's max-min sharing of the same links: rows of `simgrid.csv`.

Every collective of one block of a model, under each scheme, hop by hop and as a flat ring: all ranks at once,
so that groups that share links contend. Both times count bandwidth alone, without latency.
"""

import json
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lowband.cost.bytes import Transfer, transfers, unit_numels
from lowband.cost.collectives import Network
from lowband.errors import UserError
from lowband.spec.machine import Machine
from lowband.spec.mesh import Levels
from lowband.spec.model import ModelSpec
from lowband.spec.scheme import Scheme
from lowband.spec.stack import Stack
from lowband.spec.step import Pattern

TIME_LIMIT_S = 600
MOST_RANKS = 4096  # whose messages are lists of Python: an all-to-all of so many is 17 million
Message = tuple[int, int, int]  # from, to, bytes


class CollectiveCase(NamedTuple):
    """One collective. phases: lists of simultaneous messages; the phases follow each other."""

    scheme: str
    collective: str
    algorithm: str
    closed_form_s: float
    phases: list[list[Message]]


def missing(python: str) -> str:
    """Why this Python cannot import SimGrid, in one line; empty if it can."""
    try:
        tried = subprocess.run(
            [python, "-c", "import simgrid"], capture_output=True, text=True, timeout=60, check=False
        )
    except OSError as error:
        return f"{python}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"{python} does not answer"
    return "" if tried.returncode == 0 else f"{python} has no simgrid (Debian: python3-simgrid)"


def check(
    python: str, machine: Machine, stack: Stack, model: ModelSpec, schemes: Sequence[Scheme], ranks: int
) -> list[dict[str, Any]]:
    """One row per collective: seconds in closed form and simulated, and simulated over closed form.

    python: an interpreter that has simgrid. Raises UserError if it lacks it, or if the simulation fails.
    """
    reason = missing(python)
    if reason:
        raise UserError(reason)
    if not 2 <= ranks <= MOST_RANKS:
        what = f"{ranks} ranks send nothing" if ranks < 2 else f"a simulation of {ranks} ranks"
        raise UserError(what, allowed=f"2 to {MOST_RANKS:,}")
    levels = Levels.fit(machine.sizes, ranks)
    cases = [case for scheme in schemes for case in _cases(machine, stack, model, scheme, levels)]
    network = _bare(machine, stack, "hops")
    rates = [0.0, *(network.rate(name) for name in levels.names[1:])]
    given = {"sizes": levels.sizes, "bytes_per_s": rates, "cases": [case.phases for case in cases]}
    return [
        {
            "provenance": "predicted", "cluster": machine.name, "stack": stack.name, "model": model.name,
            "ranks": ranks,
            **{key: value for key, value in case._asdict().items() if key != "phases"},
            "simulated_s": simulated, "simulated_over_closed_form": simulated / case.closed_form_s,
        }
        for case, simulated in zip(cases, _simulate(python, given), strict=True)
    ]  # fmt: skip


def _cases(
    machine: Machine, stack: Stack, model: ModelSpec, scheme: Scheme, levels: Levels
) -> Iterator[CollectiveCase]:
    numel = unit_numels(model, levels)[1]
    parts: dict[str, list[Transfer]] = {}
    for t in transfers(numel, False, scheme, levels, "bf16", "bf16"):
        parts.setdefault(t.collective.name, []).append(t)
    hops, flat = _bare(machine, stack, "hops"), _bare(machine, stack, "flat")
    for name, collective in parts.items():
        time = float(hops.collective_s(collective))
        yield CollectiveCase(
            scheme.name, name, "hops", time, [_phase(part, scheme, levels) for part in collective]
        )
        around = [part.hop for part in sorted(collective, key=lambda part: part.hop.stride)]
        sent = sum(part.sent_bytes for part in collective)
        if len(set(around)) == len(around) > 1:  # an all-reduce passes each level twice
            time = float(flat.ring_s(around, sent))
            yield CollectiveCase(scheme.name, name, "flat ring", time, [_ring(around, sent, levels.world)])


def _phase(part: Transfer, scheme: Scheme, levels: Levels) -> list[Message]:
    """Messages of a hop. Of a swap, whose partners change: those to the next replica."""
    if part.collective.kind == "swap":
        return _ring(levels.hops(*scheme.span(part.collective)), part.sent_bytes, levels.world)
    return _hop(part, levels.world)


def _hop(part: Transfer, ranks: int) -> list[Message]:
    """Messages from every rank of a group to every other."""
    size = part.sent_bytes // (part.hop.count - 1)
    return [(a, b, size) for a in range(ranks) for b in part.hop.partners(a) if a != b]


def _ring(hops: Sequence[Any], sent: int, ranks: int) -> list[Message]:
    """Messages around a ring of each group's ranks, each sending all its bytes to the next."""
    inside, around = hops[0].stride, hops[-1].stride * hops[-1].count
    return [(a, a // around * around + (a % around + inside) % around, sent) for a in range(ranks)]


def _bare(machine: Machine, stack: Stack, algorithm: Pattern) -> Network:
    """The links' bandwidths only, each with the stack's share of it."""
    levels = tuple(
        level.model_copy(update={"link": level.link and level.link.model_copy(update={"latency_us": None})})
        for level in machine.levels
    )
    bare = Stack(name="bare", description=stack.name, collectives=algorithm, efficiency=stack.efficiency)
    return Network(machine.model_copy(update={"levels": levels}), bare)


def _simulate(python: str, given: dict[str, Any]) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder, name) for name in ("given.json", "found.json")]
        files[0].write_text(json.dumps(given), encoding="utf-8")
        job = Path(__file__).with_name("simgrid_job.py")
        try:
            done = subprocess.run(
                [python, str(job), *map(str, files)],
                capture_output=True, text=True, timeout=TIME_LIMIT_S, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            raise UserError(f"SimGrid took more than {TIME_LIMIT_S} s", allowed="fewer ranks") from None
        if done.returncode:
            errors = done.stderr.strip().splitlines()
            raise UserError(f"SimGrid: {errors[-1] if errors else f'exit {done.returncode}'}")
        found: list[float] = json.loads(files[1].read_text(encoding="utf-8"))
        return found
