"""Every placement of weights, gradients and optimizer over the levels, with its wires."""

import itertools
from functools import lru_cache

from lowband.cost.bytes import transfers
from lowband.predict.search.candidates import WIRES
from lowband.spec.mesh import Levels
from lowband.spec.scheme import Scheme


@lru_cache(maxsize=64)
def schemes(levels: Levels, exact: bool = False) -> tuple[Scheme, ...]:
    """Every placement and its wires. Levels with no more ranks than the level inside them are left out.

    exact: whether all wires are native
    """
    found = []
    names = ["self", *(name for name in levels.names[1:] if _adds_ranks(levels, name))]
    for weights, grads, optim in itertools.combinations_with_replacement(names, 3):
        for secondary in (None, *names[: names.index(weights)]):
            placed = Scheme(name="plan", weights=weights, secondary=secondary, grads=grads, optim=optim)
            used = {t.collective.name for t in transfers(levels.world, False, placed, levels, "bf16", "bf16")}
            choices = [wires if name in used and not exact else wires[:1] for name, wires in WIRES.items()]
            for wires in itertools.product(*choices):
                found.append(placed.model_copy(update=dict(zip(WIRES, wires, strict=True))))
    return tuple(found)


def _adds_ranks(levels: Levels, name: str) -> bool:
    i = levels.index(name)
    return levels.sizes[i] > levels.sizes[i - 1]
