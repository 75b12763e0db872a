"""The input of a prediction: what is given, if it can be and is predicted; points of a grid; a run's."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from lowband.predict.given import Given
from lowband.predict.refused import check
from lowband.spec.axes import SCHEDULE_OF, Axes, Ways
from lowband.spec.run import RunSpec
from lowband.spec.sourced import Fact
from lowband.spec.stack import OURS


@dataclass(frozen=True)
class Workload(Given):
    """One point, or a grid, that can be and is predicted."""

    def __post_init__(self) -> None:
        """Raises UserError for what cannot be, and for what is not predicted (predict.refused)."""
        check(self)

    def points(self) -> tuple[tuple[int, ...], list["Workload"]]:
        """The shape of the grid, () of one point, and its points."""
        names = ("micro_batch", "seq_len", "accumulation")
        values = np.broadcast_arrays(*(getattr(self, name) for name in names), *self.faster.values())
        found = []
        for one in zip(*(np.ravel(each).tolist() for each in values), strict=True):
            faster = dict(zip(self.faster, one[len(names) :], strict=True))
            found.append(self.varied(**dict(zip(names, one, strict=False)), faster=faster))
        return values[0].shape, found

    def varied(self, **changes: Any) -> "Workload":
        """`replace`, unchecked, by what is as possible. What has been worked out stays, so that neither the
        axes' degrees nor a scheme's tiers may change."""
        made = object.__new__(type(self))  # `copy` takes several times as long
        vars(made).update(vars(self), **changes)
        if "beyond" in changes:
            vars(made).pop("_of_both", None)
        return made


def workload_of(spec: RunSpec) -> Workload:
    """A run of our engine on its machine at full scale; the stack that the machine names is not used."""
    none = Fact(value=0, source="the run's spec")
    stack = OURS.model_copy(
        update={"reduce_dtype": spec.reduce_dtype} | ({} if spec.overlap else {"overlap": none})
    )
    return Workload(
        spec.machine, stack, spec.model, spec.scheme, spec.ranks, spec.micro_batch, spec.seq_len,
        spec.accumulation, recompute=spec.recompute,
        recomputed=len(spec.recomputed) / spec.model.layers if spec.recompute_layers else 1.0,
        axes=Ways(
            **Axes.of(spec).model_dump(), chunks=spec.chunks_each if spec.is_in_stages else 1,
            schedule=SCHEDULE_OF[spec.schedule if spec.is_in_stages else spec.order], layers=spec.layers,
        ),
        compute_dtype=spec.compute_dtype, collectives=spec.collectives,
        loss_chunks=spec.loss_chunks, fused_adamw=spec.fused_adamw,
    )  # fmt: skip
