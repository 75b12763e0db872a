"""Check that ranks fill host after host: otherwise a level's messages use another level's links."""

from collections.abc import Sequence
from itertools import groupby

from lowband.errors import UserError
from lowband.spec.mesh import Levels

MENDED_BY = "ranks numbered host after host: srun --distribution=block, or torchrun's own numbering"


def check_hosts(hosts: Sequence[str], levels: Levels) -> None:
    """Check the ranks' hosts against the levels.

    hosts: the host of each rank, by rank
    Raises UserError if a host's ranks are not consecutive, or if a level's group contains only a part of one
    host together with ranks of another.
    """
    runs = [(host, len(list(ranks))) for host, ranks in groupby(hosts)]
    seen: set[str] = set()
    for host, _ in runs:
        if host in seen:
            first, other = hosts.index(host), next(r for r, name in enumerate(hosts) if name != host)
            raise UserError(
                f"ranks are not numbered host after host: rank {first} runs on {host}, rank {other} on "
                f"{hosts[other]}, and a later rank on {host} again",
                allowed=MENDED_BY,
            )
        seen.add(host)
    for name, size in zip(levels.names[1:-1], levels.sizes[1:-1], strict=True):
        _check_level(name, size, runs)


def _check_level(level: str, size: int, runs: Sequence[tuple[str, int]]) -> None:
    """Raise UserError unless each group of `size` consecutive ranks is within a host or of whole hosts."""
    start = 0
    for host, count in runs:
        stop = start + count
        is_whole = start // size == (stop - 1) // size  # the host lies inside one group
        if not is_whole and (start % size or stop % size):
            raise UserError(
                f"a group of {size} ranks of level '{level}' reaches beyond host {host}, which holds ranks "
                f"{start} to {stop - 1} and a part of another such group",
                allowed="as many ranks on each host as fill whole groups",
            )
        start = stop
