"""The equal parts of a collective's buffer: where this rank's lies, and sums of those of partners.

[Note: joined sums] On gloo the owner of a shard receives every rank's part of it and sums in the order of
hops: over the innermost level's partners, then those sums over the next one's. So the bits are those of hops.
"""

from collections.abc import Sequence

import torch

from lowband.engine.transport.axis import BoundHop
from lowband.spec.mesh import Hop


def are_exchanges(hops: Sequence[BoundHop]) -> bool:
    """Whether unencoded values are exchanged to be summed: not in a ring or by the back end."""
    return bool(hops) and all(bound.back is not None and not bound.is_ring for bound in hops)


def range_of(out: torch.Tensor, hops: Sequence[BoundHop]) -> tuple[int, int]:
    """Where this rank's shard lies, and its length: the innermost coordinate cuts first."""
    start, length = 0, out.numel()
    for bound in hops:
        length //= bound.hop.count
        start += bound.place * length
    return start, length


def sum_rows(rows: list[torch.Tensor], hops: Sequence[Hop], out: torch.Tensor) -> None:
    """The sum of rows, in the order of the hops' partners: a reference can repeat it bit by bit.

    Overwrites all rows but the last; `out` may be one of them. See [Note: joined sums].
    """
    for hop in hops:
        width = len(rows) // hop.count
        for place in range(width):
            *first, last = rows[place::width]
            for row in first[1:]:
                first[0] += row
            torch.add(first[0], last, out=first[0] if width > 1 else out)
        rows = rows[:width]
