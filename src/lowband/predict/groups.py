"""Groups of nodes as a level: states sharded over each, and replicated over them (HSDP)."""

from collections.abc import Sequence

from lowband.errors import UserError
from lowband.predict.workload import Workload
from lowband.spec.machine import Level, Machine
from lowband.spec.mesh import WORLD
from lowband.spec.scheme import NODE, Scheme
from lowband.spec.stack import ANY, Stack

_GROUP = "group-"
_STATES = ("weights", "grads", "optim")


class Grouped(Machine):
    """A machine with groups of several nodes as one more level, the one just inside the world."""

    @property
    def group(self) -> str:
        """The level's name."""
        return self.levels[-2].name

    @property
    def node_size(self) -> int:
        """Ranks per node, of which a group has several."""
        return max((size for name, size in self.sizes.items() if name != self.group), default=1)


def over_groups(scheme: Scheme, ranks: int) -> Scheme:
    """The scheme with what it shards over all ranks sharded over each group of so many; itself, if it shards
    nothing so."""
    update = {key: f"{_GROUP}{ranks}" for key in _STATES if getattr(scheme, key) == WORLD}
    name = {"name": f"{scheme.name}, groups of {ranks}"}
    return scheme.model_copy(update=name | update) if update else scheme


def check_sharded(schemes: Sequence[Scheme]) -> None:
    """Raises UserError if none of them shards anything over all ranks."""
    if all(over_groups(scheme, 1) is scheme for scheme in schemes):
        names = " or ".join(f"'{scheme.name}'" for scheme in schemes)
        what = f"scheme {names} shards nothing over all ranks"
        raise UserError(what, where="--groups", allowed="schemes that do")


def with_groups(machine: Machine, stack: Stack, ranks: int, of: int) -> tuple[Grouped, Stack]:
    """The machine with one more level, of groups of so many ranks with the links between nodes, and the stack
    with what it reaches of them there. The level's name has their number: a search may try several.

    ranks: of all axes: those that share a group's nodes
    of:    the job's
    Raises UserError for groups that are no several whole nodes, or do not divide the job.
    """
    node, world, name = machine.node_size, machine.levels[-1], f"{_GROUP}{ranks}"
    if name in machine.sizes:
        raise UserError(f"machine '{machine.name}' has a level '{name}'", where="--groups")
    if ranks <= node or ranks % node:
        level = machine.levels[-2].name if len(machine.levels) > 1 else NODE
        inside = "nodes" if level == NODE else f"groups of level '{level}'"
        what = f"groups of {ranks} ranks on {inside} of {node}"
        raise UserError(what, where="--groups", allowed=f"multiples of {node} from {2 * node}")
    if ranks >= of or of % ranks:
        what = f"groups of {ranks:,} ranks in a job of {of:,}"
        raise UserError(what, where="--groups", allowed="fewer than those, that divide them")
    group = Level(name=name, size=ranks, link=world.link)
    of_world = stack.efficiency.get(WORLD, stack.efficiency.get(ANY))
    reached = {} if of_world is None else {name: of_world}
    return (
        Grouped.model_construct(**{**dict(machine), "levels": (*machine.levels[:-1], group, world)}),
        stack.model_copy(update={"efficiency": {**stack.efficiency, **reached}}),
    )


def check_replicated(job: Workload) -> Workload:
    """The job on a machine with groups. Raises UserError if one has all ranks along the data axis: pipeline,
    the outermost axis, may leave no others."""
    if not job.levels.hops(job.machine.levels[-2].name, WORLD):
        what = f"one group has all {job.levels.world:,} ranks along the data axis: it would change nothing"
        raise UserError(what, where="--groups", allowed="fewer ranks")
    return job


def is_new(scheme: Scheme, job: Workload) -> bool:
    """Whether the machine has no groups, or the scheme places a state over some that it replicates."""
    if not isinstance(job.machine, Grouped):
        return True
    places = scheme.weights, scheme.secondary, scheme.grads, scheme.optim
    return job.machine.group in places and bool(job.levels.hops(job.machine.group, WORLD))
