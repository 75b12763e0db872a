"""The schemes of config/schemes.yaml without sync, and for each the levels on which it is tried."""

from collections.abc import Mapping

import lowband
from lowband.spec.config import Config
from tests.checkout import CONFIG

INNER = {"package": 2, "node": 4}


def levels_of(name: str, inner: Mapping[str, int] = INNER, config: Config = CONFIG) -> dict[str, int]:
    """The levels of Frontier, or of another machine in slurm/ that has those of the scheme; {} if none has.

    inner: their sizes; each further level is twice the one inside of it
    """
    machine = config.machine_for(config.scheme(name), "frontier")
    if machine is None:
        return {}
    sizes = list(inner.values())
    while len(sizes) < len(machine.sizes):
        sizes.append(2 * sizes[-1])
    return dict(zip(machine.sizes, sizes, strict=False))


WITHOUT_SYNC = sorted(name for name in CONFIG.schemes if CONFIG.scheme(name).sync is None)
SCHEMES = [name for name in WITHOUT_SYNC if levels_of(name)]


class Topologies:
    """One topology for each set of levels that schemes are tried on, in a process of `on_ranks`."""

    def __init__(self, inner: Mapping[str, int] = INNER) -> None:
        self._inner = inner
        self._made: dict[tuple[tuple[str, int], ...], lowband.Topology] = {}

    def of(self, scheme: str) -> lowband.Topology:
        levels = levels_of(scheme, self._inner)
        key = tuple(levels.items())
        if key not in self._made:
            self._made[key] = lowband.Topology(levels)
        return self._made[key]
