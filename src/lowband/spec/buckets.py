"""Units whose gradients are reduced together: the only home of this rule.

Where every rank ends with the whole gradient, a unit need not be one message: every rank gets all of it in
any division. So small units are collected into buckets, as torch's DDP does, because a message costs time
however short it is. Sums stay the same bit by bit, but for rings, whose order depends on where a value lies.
Quantized wires are left out: their blocks, and so the bits, would be others.
"""

from collections.abc import Sequence

from lowband.spec.mesh import SELF, Levels
from lowband.spec.scheme import Scheme
from lowband.spec.step import reductions
from lowband.spec.wire import is_plain

# Elements. In fp32 25 MiB, DDP's bucket by default.
BUCKET_NUMEL = 25 * 2**20 // 4


def buckets(numels: Sequence[int], scheme: Scheme, levels: Levels, reduce_dtype: str) -> list[list[int]]:
    """Units by bucket, as indices into `numels`.

    numels: elements per unit, padding included, in the order in which gradients become ready
    A bucket has at most BUCKET_NUMEL elements, or one unit.
    """
    found: list[list[int]] = []
    room = 0
    collects = _collects(scheme, levels, reduce_dtype)
    for place, numel in enumerate(numels):
        if not collects or numel > room:
            found.append([])
            room = BUCKET_NUMEL
        found[-1].append(place)
        room -= numel
    return found


def _collects(scheme: Scheme, levels: Levels, reduce_dtype: str) -> bool:
    rows = [row for row in (*reductions("pass"), *reductions("step")) if levels.hops(*scheme.span(row))]
    is_whole = not levels.hops(SELF, scheme.optim)
    return is_whole and bool(rows) and all(is_plain(scheme.wire(row.name), reduce_dtype) for row in rows)
