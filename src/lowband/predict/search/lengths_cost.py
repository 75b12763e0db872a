"""What `search/lengths.py` plans with, from the predictor: seconds by degree, tokens that a rank holds.

A sequence is a micro-batch of its own on ranks along context: seconds of its forward, recomputation, backward
and what its exchanges leave to wait for (predict/time.py), in the fastest of the ways for the levels that it
crosses. Ways with `gather` are left out: a rank then holds all keys of a sequence, however many share it.
States lie on all ranks, as under zero3. A micro-step also waits for the share of gathers and reductions that
the stack cannot hide.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lowband.cost.collectives import share
from lowband.cost.numbers import GIB
from lowband.errors import UserError
from lowband.predict.context_ways import ALL_WAYS, in_ways
from lowband.predict.footprint import memory_items, peak_bytes
from lowband.predict.room import DoesNotFit
from lowband.predict.search.lengths_step import Costs
from lowband.predict.time import step_time
from lowband.predict.workload import Workload
from lowband.spec.axes import Ways
from lowband.spec.context import check_layout, layout_of
from lowband.spec.machine import Machine
from lowband.spec.mesh import SELF, WORLD
from lowband.spec.model import ModelSpec
from lowband.spec.scheme import Scheme
from lowband.spec.stack import Stack
from lowband.spec.step import STEP, Recompute

OF_A_SEQUENCE = ("forward", "recompute", "backward", "straggler", "context")  # items of a step's time
SHARDED = Scheme(name="zero3", weights="world", grads="world", optim="world")
MOST = 4096  # sequences of a batch
PROBE = 4096  # tokens of a rank in the smaller of two workloads, for the memory of one


@dataclass(frozen=True)
class Job:
    """A model on a machine's ranks, whose batch has sequences of many lengths."""

    machine: Machine
    stack: Stack
    model: ModelSpec
    ranks: int
    recompute: Recompute
    known: dict[tuple[int, int], tuple[float, str]] = field(default_factory=dict)

    def workload(self, axes: Ways, seq_len: int | NDArray[np.int64], accumulation: int = 1) -> Workload:
        return Workload(
            self.machine, self.stack, self.model, SHARDED, self.ranks, 1, seq_len, accumulation,
            recompute=self.recompute, axes=axes,
        )  # fmt: skip

    @property
    def degrees(self) -> list[int]:
        """Powers of two that divide the ranks, and in which some way divides the model's heads."""
        powers = [2**i for i in range(self.ranks.bit_length()) if self.ranks % 2**i == 0]
        return [degree for degree in powers if self.axes(degree)]

    def axes(self, degree: int) -> list[Ways]:
        """Ways of this degree, without those that gather and those that heads cannot be divided for."""
        found = []
        for one in in_ways(self.machine, self.model, self.ranks, Ways.of_options(cp=degree), [ALL_WAYS]):
            layout = layout_of(self.machine.sizes, one, self.ranks)
            try:
                check_layout(layout, one, self.model, layout.multiple)
            except UserError:
                continue
            if layout.ranks("gather") == 1:
                found.append(one)
        return found

    def zone(self, degree: int) -> str:
        """The outermost level whose links ranks of this degree cross."""
        if degree == 1:
            return "rank"
        levels = layout_of(self.machine.sizes, Ways.of_options(cp=degree), self.ranks).levels
        return [hop.level for hop in levels.hops(SELF, WORLD)][-1]

    def costs(self) -> Costs:
        """Raises DoesNotFit if the model's states alone do not fit."""
        seconds = {degree: self._seconds(degree) for degree in self.degrees}
        return Costs(seconds, self._room(), self._fixed_s(), lambda length, d: self.known[d, length][1])

    def _seconds(self, degree: int) -> Callable[[NDArray[np.int64]], NDArray[np.float64]]:
        def seconds(lengths: NDArray[np.int64]) -> NDArray[np.float64]:
            new = np.array(sorted({int(n) for n in lengths if (degree, int(n)) not in self.known}), dtype=int)
            if new.size:
                rows = [(self._of_way(axes, new), axes) for axes in self.axes(degree)]
                for i, length in enumerate(new):
                    time, axes = min(((row[i], axes) for row, axes in rows), key=lambda one: one[0])
                    self.known[degree, int(length)] = float(time), axes.attends
            return np.array([self.known[degree, int(n)][0] for n in lengths])

        return seconds

    def _of_way(self, axes: Ways, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        multiple = layout_of(self.machine.sizes, axes, self.ranks).multiple
        items = step_time(self.workload(axes, -(-lengths // multiple) * multiple)).items
        return np.zeros(len(lengths)) + sum(items[name] for name in OF_A_SEQUENCE)

    def _fixed_s(self) -> float:
        lane = step_time(self.workload(Ways(), PROBE)).lane
        waited = sum(float(lane.get(row.name, 0.0)) for row in STEP if row.every == "pass")
        return (1 - share(self.stack.overlap, "value")) * waited

    def _room(self) -> float:
        """Tokens: of the ways and degrees, of that with the most bytes a token."""
        if self.machine.device.memory_gib is None:
            return float("inf")
        memory, rooms = self.machine.device.memory_gib * GIB, list[float]()
        for degree in self.degrees:
            for axes in self.axes(degree):
                jobs = [self.workload(axes, times * PROBE * degree, 2) for times in (1, 2)]
                one, two = (float(peak_bytes(memory_items(job), job.keeps_grads)) for job in jobs)
                rooms.append(PROBE * (1 + (memory - one) / (two - one)))
        if min(rooms) < 1:
            have = f"{self.ranks} x {self.machine.device.memory_gib:g} GiB"
            what = f"'{self.model.name}' does not fit {have}: no room for a token beside its states"
            raise DoesNotFit(what)
        return min(rooms)


def read_lengths(path: Path, model: ModelSpec) -> list[int]:
    """A batch: one length in tokens a line. Raises UserError for what is none, or longer than the model's."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"is no text: {error}", where=path) from None
    lengths = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        if not (line.strip().isascii() and line.strip().isdigit()) or len(line.strip()) > 12:
            raise UserError(f"'{line.strip()[:40]}' is no length", where=f"{path}:{number}", allowed="tokens")
        if not 1 <= int(line) <= model.seq_len:
            raise UserError(
                f"a sequence of {int(line)} tokens", where=f"{path}:{number}",
                allowed=f"1 to {model.seq_len}, the longest of '{model.name}'",
            )  # fmt: skip
        lengths.append(int(line))
        if len(lengths) > MOST:
            raise UserError(f"more than {MOST} sequences", where=path, allowed=f"a batch of {MOST} at most")
    if not lengths:
        raise UserError("no lengths", where=path, allowed="one a line, in tokens")
    return lengths
