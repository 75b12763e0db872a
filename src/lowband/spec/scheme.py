"""A partition scheme: for each state the level it is sharded over, for each collective its wire."""

from pathlib import Path

from pydantic import Field, PositiveInt

from lowband.errors import UserError
from lowband.spec.machine import Levels
from lowband.spec.partition import ALIGN
from lowband.spec.strict import Strict, read_named
from lowband.spec.wire import WIRE_BITS, Wire


class Scheme(Strict):
    """A row of `config/schemes.yaml`. Levels are names of the machine's levels, or `self` (not sharded).

    Wires are by collective. `native` is the compute dtype for weights, the reduce dtype for gradients.

        forward_gather   weights level -> self, before a unit's forward
        backward_gather  secondary or weights level -> self, before its backward
        grad_reduce      self -> grads level, after its backward
        boundary_reduce  grads level -> optim level, once per optimizer step
        replica_reduce   summed over the ranks beyond the optim level, once per optimizer step
        update_gather    optim level -> weights level, once per optimizer step

    Clipping by the global norm adds a `norm_gather` of one fp64 number from each rank; it is always native.
    """

    name: str
    weights: str = Field(description="level of the copy used for compute, in the compute dtype")
    secondary: str | None = Field(default=None, description="level of a second copy kept for the backward")
    grads: str = Field(description="level of the gradient accumulator")
    optim: str = Field(description="level of fp32 master weights and Adam moments")
    forward_gather: Wire = "native"
    backward_gather: Wire = "native"
    grad_reduce: Wire = "native"
    boundary_reduce: Wire = "native"
    replica_reduce: Wire = "native"
    update_gather: Wire = "native"
    block_size: PositiveInt = Field(default=ALIGN, description="values per scale of int8 and int4 wires")
    known_as: str = ""

    def check(self, levels: Levels) -> None:
        """Refuse a placement that no order of collectives can serve. Raises UserError with the reason."""
        where = f"scheme '{self.name}'"
        for key in ("weights", "grads", "optim", "secondary"):
            level = getattr(self, key)
            if level is not None and level not in levels.names:
                raise UserError(f"{key}: no level '{level}'", where=where, allowed=levels.names)
        weights, grads, optim = (levels.index(x) for x in (self.weights, self.grads, self.optim))
        if not weights <= grads <= optim:
            raise UserError(
                f"weights ({self.weights}), grads ({self.grads}), optim ({self.optim}) must go from inner "
                "to outer, so that each state's shard is a part of the one before it",
                where=where,
            )
        if self.secondary is not None and levels.index(self.secondary) >= weights:
            raise UserError(
                f"secondary ({self.secondary}) must be inside the level of weights ({self.weights}); "
                "at or beyond it, it would save nothing",
                where=where,
                allowed=levels.names[:weights],
            )

    @property
    def is_quantized(self) -> bool:
        """Whether some collective travels in fewer bits than its values have."""
        wires = (
            self.forward_gather,
            self.backward_gather,
            self.grad_reduce,
            self.boundary_reduce,
            self.replica_reduce,
            self.update_gather,
        )
        return any(wire in WIRE_BITS for wire in wires)

    @property
    def backward_level(self) -> str:
        """The level that the backward gathers weights from."""
        return self.weights if self.secondary is None else self.secondary


def read_scheme(path: Path, name: str) -> Scheme:
    scheme: Scheme = read_named(Scheme, path, name)
    return scheme
