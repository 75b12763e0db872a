"""What lowband keeps for one sharded module: its units, what they share, and what others ask of it.

The order of events in a pass is that of passes.hooks; passes.passes says which other ones there are.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import contextmanager

import torch
from torch import nn

from lowband.engine.collectives.activations import Along
from lowband.engine.collectives.collectives import Collectives
from lowband.engine.options import Options, device_of
from lowband.engine.passes.alike import check_drawn, with_initial
from lowband.engine.passes.hooks import Hooks
from lowband.engine.passes.kept_on_host import KeptOnHost
from lowband.engine.passes.passes import Passes
from lowband.engine.passes.places import Places
from lowband.engine.replicas.replicas import Replicas
from lowband.engine.transport.axis import Axis
from lowband.engine.transport.consistency import agreed, check_same_sharding, check_schemes
from lowband.engine.transport.meter import MemoryMeter
from lowband.engine.units.changes import check_unsharded
from lowband.engine.units.division import Wrap, divide
from lowband.engine.units.initial import Init, Initial, Source
from lowband.engine.units.kinds import check_kinds
from lowband.engine.units.leaves import Slot
from lowband.engine.units.on_disk import OnDisk
from lowband.engine.units.parts import along_experts, along_tensor, check_blocks, ledger_of
from lowband.engine.units.room import check_room
from lowband.engine.units.slice_of import is_of_expert
from lowband.engine.units.tied_to import tied_to
from lowband.engine.units.unit import Unit
from lowband.engine.units.unusable import mark_views
from lowband.errors import UserError
from lowband.spec.mesh import Levels
from lowband.spec.partition import UnitLayout
from lowband.spec.scheme import Scheme
from lowband.spec.tiers import HOST

Group = tuple[nn.Module, str, list[list[Slot]]]  # of a unit: its owner, its name, its parameters' places


class Engine:
    """The state that lowband keeps for one sharded module."""

    ends: Set[str] = frozenset()  # of a pipeline: the units of its embedding and its head
    load: Along | None = None  # over which experts' loads are summed
    at_owners = 0  # lowband.Matrices inside of their step, which have taken gradients from the shards

    def __init__(
        self,
        module: nn.Module,
        scheme: Scheme,
        scheme_of: Callable[[str, nn.Module], Scheme],
        axis: Axis,
        wrap: Wrap,
        options: Options,
        init: Init | Source | None,
        seed: int,
        device: torch.device | str | None,
    ) -> None:
        """scheme_of: maps a unit's name and owner to its scheme; `scheme` serves collectives of no unit

        init, seed: of parameters on the meta device, see units.initial; device: of all, see `device_of`
        """
        check_unsharded(module)
        check_kinds(module)
        groups = divide(module, wrap)
        self.axis, self.experts = axis, (experts := along_experts(module))
        schemes = _schemes_of(groups, scheme, scheme_of, axis.levels, experts is not None)
        wrapped = dict.fromkeys(owner for owner, *_ in groups if owner is not module)  # in their order
        on_host = {owner for owner in wrapped if options.activations_of(owner) == HOST}
        if experts is not None:
            experts.check(schemes)
        placed = [(name, of_unit) for (_, name, _), of_unit in zip(groups, schemes, strict=True)]
        alike = {
            "compute_dtype": str(options.compute_dtype),
            "reduce_dtype": str(options.reduce_dtype),
            "collectives": options.pattern,
            "seed of initial values": seed,
        }
        check_same_sharding(module, scheme, placed, alike, axis, self._of_experts(module))
        if next(module.parameters(), None) is None:
            raise UserError("the module has no parameters to shard", where=type(module).__name__)
        self.module = module
        self.tensor = with_initial(module, along_tensor(module))
        check_blocks(schemes, self.tensor)
        check_drawn(module, experts)
        self.pipeline: Along | None = None  # whose other ranks have other stages
        self.ledger, self.meter = ledger_of(self.tensor), MemoryMeter()
        if experts is not None:
            experts.count_in(self.ledger)
        self.device = agreed(lambda: device_of(device, module))  # a launcher may give each rank another
        self._check_room([slots for *_, slots in groups], schemes, options.compute_dtype)
        mark_views(module)
        self.sync = True  # whether the next backward ends at an accumulation boundary

        self._shared = self.ledger, self.meter, self.device, options
        self.collectives = Collectives(scheme, axis, *self._shared)
        self.lanes = self.collectives.lanes
        self.units: list[Unit] = []
        unit_of: dict[int, Unit] = {}  # by the storage of its gathered weights
        self.units_of: dict[nn.Module, list[Unit]] = {}
        places = self._with_collectives(groups, schemes)
        # A rank reads only what it holds of the values: what is wrong with them all must hear of.
        agreed(
            lambda: self._make_units(places, Initial(module, init, seed, self.device, self.meter), unit_of)
        )
        parts = module, self.units, self.units_of, axis, self.tensor
        self.passes = Passes(*parts, at_boundary=lambda: self.sync)
        kept = KeptOnHost(self.ledger, self.meter, on_host) if on_host else None
        self._hooks = Hooks(self.passes, unit_of, options, self.device, kept)
        self.replicas = None if scheme.sync is None else Replicas(scheme.sync, self.units, self.lanes)
        self._places = Places(module, self.units)
        module.zero_grad = self._zero_grad  # type: ignore[method-assign]

    def _with_collectives(
        self, groups: Sequence[Group], schemes: Sequence[Scheme]
    ) -> list[tuple[Group, Collectives]]:
        """Of each unit; all ranks make those that they need at once."""
        made = {(self.collectives.scheme, self.axis): self.collectives}
        found = []
        for group, scheme in zip(groups, schemes, strict=True):
            along = self._axis_of(group[2])
            if (scheme, along) not in made:
                made[scheme, along] = Collectives(scheme, along, *self._shared)
            found.append((group, made[scheme, along]))
        return found

    def _make_units(
        self, places: Sequence[tuple[Group, Collectives]], initial: Initial, unit_of: dict[int, Unit]
    ) -> None:
        """Each with its shards, filled; and the module's buffers."""
        initial.fill_buffers(self.module)
        named = self.module.named_parameters()
        names = {p: name if (of := tied_to(p)) is None else of.name for name, p in named}
        for (owner, name, slots), collectives in places:
            of_slots = [names[getattr(*of_one[0])] for of_one in slots]
            unit = Unit(name, slots, of_slots, collectives, initial, unit_of)
            self.units.append(unit)
            self.units_of.setdefault(owner, []).append(unit)

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of those that share the module."""
        return self.axis.is_first and (self.tensor is None or self.tensor.axis.is_first)

    @property
    def averaged(self) -> str | None:
        """The level over whose groups gradients are averaged in every step; None if it trains nothing."""
        scheme = self.collectives.scheme
        trains = scheme.sync is not None or any(unit.requires_grad for unit in self.units)
        return scheme.level("replica") if trains else None

    def _of_experts(self, module: nn.Module) -> tuple[list[nn.Parameter], int]:
        """Parameters that other ranks along data do not have, and the first rank that has these."""
        if self.experts is None:
            return [], self.axis.ranks[0]
        return [p for p in module.parameters() if is_of_expert(p)], self.experts.alike.ranks[0]

    def _axis_of(self, slots: Sequence[Sequence[Slot]]) -> Axis:
        """The ranks over which a unit is placed: those that have its parameters."""
        of_expert = is_of_expert(getattr(*slots[0][0]))
        return self.experts.alike if self.experts is not None and of_expert else self.axis

    def _check_room(
        self, units: Sequence[list[list[Slot]]], schemes: Sequence[Scheme], compute_dtype: torch.dtype
    ) -> None:
        whole = [[getattr(*places[0]) for places in slots] for slots in units]
        levels = [self._axis_of(slots).levels for slots in units]
        check_room([*zip(whole, schemes, levels, strict=True)], compute_dtype, self.device)

    @property
    def shards(self) -> list[nn.Parameter]:
        """The optimizer's parameters."""
        return [shard for unit in self.units for shard in unit.shards]

    def on_disk(self) -> list[tuple[OnDisk, list[nn.Parameter]]]:
        """Units' states that are elsewhere between steps, with their shards."""
        return [(unit.held.disk, unit.shards) for unit in self.units if unit.held.disk is not None]

    @property
    def tensor_ranks(self) -> int:
        """The ranks over which the module's layers are cut."""
        return 1 if self.tensor is None else self.tensor.ranks

    @property
    def other_ranks(self) -> int:
        """The ranks along other axes than data that have parts of the module."""
        return self.tensor_ranks * (1 if self.pipeline is None else self.pipeline.ranks)

    def be_stages_along(self, axis: Axis) -> None:
        """The module is what this rank has of a pipeline: others along the axis have other layers."""
        self.pipeline = Along(axis)
        self.pipeline.count_in(self.ledger)
        for unit in self.units:
            unit.changes.has_all_layers = False

    def _zero_grad(self, set_to_none: bool = True) -> None:
        """The module's zero_grad, which also discards gradients accumulated under `no_sync`."""
        self.put_shards()
        if not self.passes.backward.runs:
            self.passes.backward.forget_gradients()
        type(self.module).zero_grad(self.module, set_to_none)

    def put_shards(self) -> None:
        """Register the shards in the module, where a forward without a backward leaves whole parameters.

        Raises UserError for parameters that came in after sharding: what follows would not know them.
        """
        self._places.check()
        self._hooks.close()
        self.passes.leave_broken_backward()
        for unit in self.units:
            unit.put_shards()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes in this context accumulate gradients at the grads level and reduce no further.

        `zero_grad()` of the module or an optimizer discards the accumulated gradients.
        """
        before, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = before


def _schemes_of(
    groups: Sequence[Group],
    scheme: Scheme,
    scheme_of: Callable[[str, nn.Module], Scheme],
    levels: Levels,
    has_experts: bool,
) -> list[Scheme]:
    """By unit the scheme of all of it: the `offload` of a scheme is of all units that have it."""
    schemes = [scheme_of(name, owner) for owner, name, _ in groups]
    check_schemes(scheme, schemes, levels)
    found = list(schemes)
    for each in schemes:
        if has_experts and (key := each.parted) is not None:
            what = f"{key} of a module with experts"
            raise UserError(what, where=f"scheme '{each.name}'", allowed=f"no {key}")
    for parted in {each for each in schemes if each.offload is not None}:
        places = [place for place, each in enumerate(schemes) if each == parted]
        shapes = [[tuple(getattr(*slot[0]).shape) for slot in groups[place][2]] for place in places]
        numels = [UnitLayout.of(of_unit, levels.world).numel for of_unit in shapes]
        for place, placed in zip(places, parted.of_units(numels), strict=True):
            found[place] = placed
    return found


def engine_of(module: nn.Module) -> Engine:
    """The engine of a sharded module. Raises UserError if it is not sharded."""
    engine = getattr(module, "_lowband", None)
    if isinstance(engine, Engine):
        return engine
    where, what, allowed = type(module).__name__, "the module is not sharded", "after lowband.shard"
    if not isinstance(module, nn.Module):
        what, allowed = "is no module", "the sharded module itself, not its parameters"
    else:
        inside = [name for name, child in module.named_modules() if hasattr(child, "_lowband")]
        allowed = f"its '{inside[0]}', which is" if inside else allowed
    raise UserError(what, where=where, allowed=allowed)
