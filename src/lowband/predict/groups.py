"""Groups of nodes as a level: states sharded over each, and replicated over them (HSDP)."""

from lowband.errors import UserError
from lowband.spec.machine import Level, Machine
from lowband.spec.mesh import WORLD
from lowband.spec.scheme import Scheme
from lowband.spec.stack import ANY, Stack

GROUP = "group"
_STATES = ("weights", "grads", "optim")


def over_groups(scheme: Scheme) -> Scheme:
    """The scheme with what it shards over all ranks sharded over each group. Raises UserError if it shards
    nothing so."""
    update = {key: GROUP for key in _STATES if getattr(scheme, key) == WORLD}
    if not update:
        what = f"scheme '{scheme.name}' shards nothing over all ranks"
        raise UserError(what, where="--groups", allowed="schemes that do")
    return scheme.model_copy(update=update)


def with_groups(machine: Machine, stack: Stack, ranks: int, of: int) -> tuple[Machine, Stack]:
    """The machine with one more level, of groups of so many ranks with the links between nodes, and the stack
    with what it reaches of them there.

    of: the job's ranks
    Raises UserError for groups that are no several whole nodes, or of no fewer ranks than the job has.
    """
    node, world = machine.node_size, machine.levels[-1]
    if ranks <= node or ranks % node:
        what = f"groups of {ranks} ranks on nodes of {node}"
        raise UserError(what, where="--groups", allowed=f"multiples of {node} from {2 * node}")
    if ranks >= of:
        what = f"groups of {ranks:,} ranks in a job of {of:,}"
        raise UserError(what, where="--groups", allowed="fewer than those")
    group = Level(name=GROUP, size=ranks, link=world.link)
    of_world = stack.efficiency.get(WORLD, stack.efficiency.get(ANY))
    reached = {} if of_world is None else {GROUP: of_world}
    return (
        machine.model_copy(update={"levels": (*machine.levels[:-1], group, world)}),
        stack.model_copy(update={"efficiency": {**stack.efficiency, **reached}}),
    )
