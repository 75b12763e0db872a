"""The search of `lowband plan --outer-gbps`: how often, on which wire and how late replicas exchange weights.

Each replica is a node. A step that averages gradients over the slow link waits for it. Replicas that meet
every H steps wait less, and know less of each other: what they exchange differs by up to H steps, and arrives
`delay` steps later. So the user bounds the staleness, H + delay; nothing here predicts a loss. Of the choices
under that bound whose speed is within the model's error of the fastest, the one with the least lossy wire,
then the least stale, is taken.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowband.cost.numbers import GIB
from lowband.errors import UserError
from lowband.predict.prediction import Prediction, predict
from lowband.predict.room import DoesNotFit
from lowband.predict.search.candidates import MODEL_ERROR
from lowband.predict.workload import Workload
from lowband.spec.machine import Machine
from lowband.spec.mesh import WORLD, Levels
from lowband.spec.scheme import Scheme
from lowband.spec.step import ANCHOR_GATHER, SYNC_REDUCE, Recompute
from lowband.spec.wire import Wire

PERIODS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
DELAYS = (0, 1, 5, 20, 50)
WIRES: tuple[Wire, ...] = ("native", "int8", "int4")
MIX = 0.5  # of a late exchange: it changes no time


@dataclass(frozen=True)
class Choice:
    """One point of the search. computing: the part of a step that does not wait for replicas."""

    job: Workload
    prediction: Prediction

    @property
    def staleness(self) -> int:
        sync = self.job.scheme.sync
        return 0 if sync is None else sync.every + sync.delay

    @property
    def wire(self) -> Wire:
        return self.job.scheme.wire(SYNC_REDUCE.name)

    @property
    def step_s(self) -> float:
        return float(self.prediction.step_time_s)

    @property
    def computing(self) -> float:
        waits = (self.prediction.time_s[f"exposed_{row.name}"] for row in (SYNC_REDUCE, ANCHOR_GATHER))
        return 1 - float(sum(waits)) / self.step_s

    def row(self) -> dict[str, Any]:
        """What `--json` and `--csv` have of it."""
        sync = self.job.scheme.sync
        return {
            "inside": self.job.scheme.name, "every": sync.every if sync else 1, "wire": self.wire,
            "delay": sync.delay if sync else 0, "staleness": self.staleness, "step_s": self.step_s,
            "computing": self.computing, "tflops_per_gpu": float(self.prediction.tflops_per_gpu),
            "peak_gib": float(self.prediction.peak_memory_bytes) / GIB,
            "recompute": self.job.recompute, "micro_batch": self.job.micro_batch,
        }  # fmt: skip


def with_outer_rate(machine: Machine, gigabits_per_s: float) -> Machine:
    """The machine with this much for each node's link to other nodes, which all of its ranks share.

    Raises UserError if the machine has no such link.
    """
    present = machine.link(WORLD).gigabytes_per_s
    return machine.with_outer_link(gigabits_per_s / 8 / machine.node_size / present)


def possible(schemes: Sequence[Scheme], machine: Machine, ranks: int) -> list[Scheme]:
    """Those that the machine's levels can serve, on its levels.

    Raises UserError if all ranks are in one node, and that of the first scheme if none can be served.
    """
    if ranks <= machine.node_size:
        raise UserError(
            f"{ranks} ranks are in one node", where=machine.name, allowed=f"more than {machine.node_size}"
        )
    inner, levels = list(machine.sizes), Levels.fit(machine.sizes, ranks)
    found, errors = [], []
    for scheme in schemes:
        try:
            placed = scheme.on(inner)
            placed.check(levels)
        except UserError as error:
            errors.append(error)
        else:
            found.append(placed)
    if not found:
        raise errors[0]
    return found


def plan(
    job: Workload,
    inside: Sequence[Scheme],
    most_stale: int,
    batches: Sequence[tuple[int, int]],
    recompute: Sequence[Recompute],
    exact: bool,
) -> list[Choice]:
    """Every choice that fits the memory and the bound, fastest first; `chosen` takes one.

    inside:  schemes of replicas, with any sync
    batches: micro-batch and passes
    Raises DoesNotFit if none fits.
    """
    jobs = [
        replace(job, scheme=scheme, micro_batch=micro, accumulation=passes, recompute=way)
        for scheme in _schemes(inside, most_stale, exact)
        for micro, passes in batches
        for way in recompute
    ]
    found = [Choice(each, predict(each, interval=False)) for each in jobs]
    fitting = [choice for choice in found if choice.prediction.fits in (True, None)]
    if not fitting:
        least = min(float(choice.prediction.peak_memory_bytes) for choice in found) / GIB
        raise DoesNotFit(
            f"no choice fits the memory: the least takes {least:.1f} GiB a rank",
            where=job.machine.name,
            allowed="more GPUs, a smaller model or micro-batch",
        )
    return sorted(fitting, key=lambda choice: choice.step_s)


def chosen(found: Sequence[Choice]) -> Choice:
    """Of those that are nearly as fast as the first: the least lossy wire, then the least stale."""
    near = [choice for choice in found if choice.step_s <= (1 + MODEL_ERROR) * found[0].step_s]
    return min(near, key=lambda choice: (WIRES.index(choice.wire), choice.staleness, choice.step_s))


def _schemes(inside: Sequence[Scheme], most_stale: int, exact: bool) -> Iterator[Scheme]:
    for scheme in inside:
        assert scheme.sync is not None
        for every in PERIODS:
            for delay in DELAYS:
                if delay > every or every + delay > most_stale:
                    continue
                sync = {"every": every, "delay": delay, "mix": MIX if delay else 0.0, "fragments": 1}
                for wire in WIRES[:1] if exact else WIRES:
                    yield scheme.model_copy(
                        update={"sync": scheme.sync.model_copy(update=sync), SYNC_REDUCE.name: wire}
                    )


def report(found: Sequence[Choice], gigabits_per_s: float) -> str:
    """The choice, and the best of each period."""
    best = chosen(found)
    lines = [
        f"predicted, with {gigabits_per_s:g} Gbit/s between nodes; the least lossy, then the least stale "
        "choice within the model's error of the fastest:",
        HEADER,
        _line(best),
        "",
    ]
    for every in PERIODS:
        same = [choice for choice in found if choice.row()["every"] == every]
        if same:
            lines.append(_line(same[0]))
    lines += ["", "The fastest of each H. Nothing here says how well a choice trains."]
    return "\n".join(lines)


HEADER = (
    f"{'H':>4} {'wire':>7} {'delay':>5}  {'inside':<14}{'computing':>10}{'step (s)':>10}{'TFLOPS/GPU':>12}"
    f"{'GiB':>7}"
)


def _line(choice: Choice) -> str:
    row = choice.row()
    return (
        f"{row['every']:>4} {row['wire']:>7} {row['delay']:>5}  {row['inside']:<14}{row['computing']:>9.1%}"
        f"{row['step_s']:>10.3f}{row['tflops_per_gpu']:>12.1f}{row['peak_gib']:>7.1f}"
    )
