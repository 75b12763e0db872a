"""A partition scheme: the level that each state is sharded over, and each collective's wire format."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    PositiveInt,
    SerializerFunctionWrapHandler,
    create_model,
    model_serializer,
    model_validator,
)

from lowband.errors import UserError
from lowband.spec.mesh import SELF, WORLD, Levels
from lowband.spec.offload import Offload
from lowband.spec.partition import ALIGN
from lowband.spec.placement import Placement
from lowband.spec.scheme_check import check
from lowband.spec.step import COPIES, MEETINGS, STEP, Collective, Place
from lowband.spec.tiers import DEVICE, DISK, HOST, TIERS, Named, Tier, apart, at
from lowband.spec.wire import WIRE_BITS, Wire

# The levels inside world that named schemes use, inner to outer; other machines may call theirs otherwise.
PACKAGE, NODE = "package", "node"


if TYPE_CHECKING:
    _WithWires = Placement
else:  # a field per collective
    _WithWires = create_model(
        "_WithWires", __base__=Placement, **{collective.name: (Wire, "native") for collective in STEP}
    )


class Scheme(_WithWires):
    """A row of `config/schemes.yaml`: a placement, and a wire for each collective of spec.step, by its name.

    `native` is the compute dtype for weights, the reduce dtype for gradients.
    """

    block_size: PositiveInt = Field(default=ALIGN, description="values per scale of int8 and int4 wires")
    known_as: str = ""

    @model_validator(mode="wrap")
    @classmethod
    def _with_tiers(cls, values: Any, handler: ModelWrapValidatorHandler["Scheme"]) -> "Scheme":
        """Take `world@host` apart."""
        given = values if isinstance(values, dict) else {}
        places = {key: given[key] for key in ("weights", "optim") if isinstance(given.get(key), str)}
        placed = {key: apart(key, place) for key, place in places.items()}
        if not placed:
            return handler(values)
        made = handler({**given, **{key: level for key, (level, _) in placed.items()}})
        for key, (_, tier) in placed.items():
            setattr(made, f"_{key}_tier", tier)
        return made

    @property
    def update_tier(self) -> Tier:
        """The tier in which the optimizer updates them, from gradients that lie there."""
        comes_to_device = self.offload is not None and self.offload.stride == 1
        return DEVICE if self._optim_tier == DEVICE or comes_to_device else HOST

    @property
    def is_moved(self) -> bool:
        """Whether the states come to the device for each update, and leave it."""
        return self._optim_tier != DEVICE and self.update_tier == DEVICE

    @property
    def is_late(self) -> bool:
        """Whether the host updates them a step late."""
        return self._optim_tier != DEVICE and self.offload is not None and self.offload.late

    def of_units(self, numels: Sequence[int]) -> list["Scheme"]:
        """By unit, the scheme of all of it: of states that are in one place, and updated in one.

        numels: elements of each unit that has this scheme, the root's first
        """
        if self.offload is None or self._optim_tier == DEVICE or self.is_late:
            return [self] * len(numels)
        device, beyond = (self.model_copy(update={"offload": None}) for _ in range(2))
        device._optim_tier = DEVICE
        moved = self.model_copy(update={"offload": Offload(stride=1)})
        placed = {"device": device, "beyond": beyond, "to and fro": moved}
        return [placed[where] for where in self.offload.of_units(numels)]

    def parts(self, numels: Sequence[int]) -> list[tuple["Scheme", list[int]]]:
        """The schemes of its units, each with its units' elements."""
        found: dict[Scheme, list[int]] = {}
        for scheme, numel in zip(self.of_units(numels), numels, strict=True):
            found.setdefault(scheme, []).append(numel)
        return list(found.items())

    @property
    def tiers(self) -> tuple[Named, ...]:
        """Those that states lie in or pass, but the device: what is on a disk passes the host."""
        lie = {self.optim_tier, self.weights_tier}
        return tuple(tier for tier in TIERS if tier in lie or (tier == HOST and DISK in lie))

    @model_serializer(mode="wrap")
    def _without_what_it_lacks(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Without the wires of exchanges that it has not, or without `sync` or `offload`, so that checksums
        stay."""
        values: dict[str, Any] = handler(self)
        values["weights"] = at(self.weights, self.weights_tier)
        values["optim"] = at(self.optim, self.optim_tier)
        absent = [row.name for row in STEP if row not in self.rows]
        absent += [key for key in ("sync", "offload") if getattr(self, key) is None]
        absent += ["resident"] * (not self.resident)
        for key in absent:
            values.pop(key, None)
        return values

    def check(self, levels: Levels) -> None:
        """Raises UserError, with the reason, for a placement that no order of collectives can serve."""
        check(self, levels, self.wire)

    def on(self, inner: Sequence[str]) -> "Scheme":
        """The scheme on a machine: `package` and `node` are matched by position where it has other names.

        inner: the machine's levels inside world, inner to outer. `node` is the outermost of them, or the one
        outside `package`; `package` is the one inside `node`. Raises UserError if there is no such level.
        """
        states = self._places
        missing = {level for level in states.values() if level in (PACKAGE, NODE) and level not in inner}
        if not missing:
            return self
        if NODE in inner:
            node = list(inner).index(NODE)
        else:
            node = list(inner).index(PACKAGE) + 1 if PACKAGE in inner else len(inner) - 1
        at = {PACKAGE: node - 1, NODE: node}
        for level in (PACKAGE, NODE):
            if level in missing and not 0 <= at[level] < len(inner):
                raise UserError(
                    f"no level '{level}', and none in its place",
                    where=f"scheme '{self.name}'",
                    allowed=f"schemes on {', '.join((SELF, *inner, WORLD))}, or a machine with that level",
                )
        update: dict[str, Any] = {key: inner[at[level]] for key, level in states.items() if level in missing}
        if self.sync is not None and "beyond" in update:
            update["sync"] = self.sync.model_copy(update={"beyond": update.pop("beyond")})
        return self.model_copy(update=update)

    @property
    def _places(self) -> dict[str, str]:
        """By key, the level of each state that it has, and of its replicas."""
        places = {key: getattr(self, key) for key in ("weights", "secondary", "grads", "optim")}
        if self.sync is not None:
            places["beyond"] = self.sync.beyond
        return {key: level for key, level in places.items() if level is not None}

    @property
    def machine_levels(self) -> set[str]:
        """The levels that a machine must have for it: those it names, but for `self` and `world`."""
        return set(self._places.values()) - {SELF, WORLD}

    def wire(self, collective: str) -> Wire:
        """The wire of a collective; native for one that is not part of a step."""
        wire: Wire = getattr(self, collective, "native")
        return wire

    @property
    def rows(self) -> tuple[Collective, ...]:
        """The collectives that the scheme runs."""
        if self.sync is None:
            return tuple(row for row in STEP if row.every != "sync")
        return tuple(row for row in STEP if row is self.meeting or row not in MEETINGS)

    @property
    def copies(self) -> tuple[Collective, ...]:
        """The rows that move the optimizer's shards between tiers."""
        return () if self.optim_tier == DEVICE else COPIES

    @property
    def period(self) -> int:
        """Optimizer steps after which what is sent repeats."""
        return 1 if self.sync is None else self.sync.every

    @property
    def is_quantized(self) -> bool:
        """Whether any collective sends quantized values."""
        return any(self.wire(collective.name) in WIRE_BITS for collective in STEP)

    @property
    def backward_level(self) -> str:
        """The level that the backward gathers weights from."""
        return self.weights if self.secondary is None else self.secondary

    def level(self, place: Place) -> str:
        """The level that `place` stands for in this scheme."""
        if place in (SELF, WORLD):
            return place
        if place == "replica":
            return WORLD if self.sync is None else self.sync.beyond
        level: str = self.backward_level if place == "backward" else getattr(self, place)
        return level

    def span(self, collective: Collective) -> tuple[str, str]:
        """The inner and the outer level of a collective."""
        return self.level(collective.inner), self.level(collective.outer)
