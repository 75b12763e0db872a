"""Below what a step waits for collectives of sharding, of all schemes of a job at once.

Of G seconds of collectives beside X seconds of computation at least max((1 - overlap) G, G - overlap X) are
exposed, however they are cut into units: of each unit, `join` leaves at least as much. A root's are exposed
whole. Each collective's seconds depend on the placement and on its own wire, so those of a placement with no
lossy wire and with all stand for all that lie between.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowband.cost.collectives import Network, share
from lowband.cost.compute import Computer
from lowband.cost.numbers import Num
from lowband.predict.exposed import Lane
from lowband.predict.lanes import lanes
from lowband.predict.place import alike
from lowband.predict.search.candidates import KNOBS, WIRES
from lowband.predict.workload import Workload
from lowband.spec.mesh import SELF
from lowband.spec.scheme import Scheme
from lowband.spec.step import BACKWARD_GATHER, STEP

Floats = NDArray[np.float64]
_ROWS = [row for row in STEP if row.every != "sync"]


@dataclass(frozen=True)
class Exposure:
    """Of each scheme, seconds of collectives of one block, and of the root, by how often a step has them.

    of_block, of_root: rows: gathered for a forward, gathered for a backward, reduced for a pass, once a step
    """

    of_block: Floats
    of_root: Floats

    def least(self, job: Workload, blocks: float, gathers: tuple[Num, Num], busy: Floats) -> Floats:
        """Seconds that are exposed at least, by scheme and micro-batch.

        blocks, gathers: of a rank in the mean, as a Place has them; busy: no less than what it computes
        """
        if job.is_in_stages:  # the last micro-batch's backward hides reductions, too
            busy = busy * (1 + 1 / job.accumulation)
        often = np.empty((4, *busy.shape))
        for row, times in zip(often, (*gathers, job.passes, 1.0), strict=True):
            row[...] = times
        beside = self.of_block.T @ (often * np.array([blocks, max(blocks - 1, 0), blocks, blocks])[:, None])
        overlap = share(job.stack.overlap, "value")
        exposed: Floats = np.maximum((1 - overlap) * beside, beside - overlap * busy)
        of_root: Floats = self.of_root.T @ often
        return exposed + of_root


def exposure(job: Workload, schemes: Sequence[Scheme]) -> Exposure:
    """job: of any micro-batch. Of uneven stages, what a mean one has: no root."""
    network = Network(job.machine, job.stack, "value", job.faster, own=job.collectives)
    computer, place = Computer(job.machine, job.compute_dtype, "value", job.stack.products), alike(job)
    known: dict[tuple[object, ...], list[tuple[Lane, Lane]]] = {}
    of_block, of_root = np.zeros((2, 4, len(schemes)))
    for i, scheme in enumerate(schemes):
        if job.axes.is_uneven and scheme.optim == SELF:  # buckets depend on the stage
            continue
        placed = tuple(getattr(scheme, name) for name in KNOBS[:4])
        if placed not in known:
            known[placed] = [
                lanes(job.varied(scheme=scheme.model_copy(update=wires)), place, network, computer)
                for wires in ({name: pair[n] for name, pair in WIRES.items()} for n in (0, 1))
            ]
        for row in _ROWS:
            root, block = known[placed][scheme.wire(row.name) != "native"]
            at = 3 if row.every == "step" else ("weights", "gradients").index(row.carries) * 2
            at += row is BACKWARD_GATHER
            of_block[at, i] += block.get(row.name, 0.0)
            of_root[at, i] += 0.0 if job.axes.is_uneven else root.get(row.name, 0.0)
    return Exposure(of_block, of_root)
