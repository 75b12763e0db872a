"""Bytes of weights beyond the device that are copied to it and from it, per rank and step, in closed form.

It is the rank's shard of a unit: new weights on their way there, behind the first forward's gather, and what
is fetched before each further gather, unless it has stayed on the device (cost.residents).
"""

from collections.abc import Iterator, Sequence
from functools import cache

from lowband.cost.memory import keeps_secondary
from lowband.cost.numbers import Num
from lowband.cost.residents import fetched, step_order
from lowband.spec.mesh import Levels
from lowband.spec.scheme import Scheme
from lowband.spec.step import BACKWARD_FETCH, FORWARD_FETCH, WEIGHTS_STASH
from lowband.spec.tiers import DEVICE, DISK, HOST
from lowband.spec.wire import DTYPE_BYTES


def weights_copies(
    units: Sequence[int], scheme: Scheme, levels: Levels, compute_dtype: str,
    gathers: Sequence[tuple[int, int]],
) -> Iterator[tuple[str, str, int]]:  # fmt: skip
    """Tier, name of the row and bytes.

    units:   elements per unit, padding included, the root's first
    gathers: by unit, how often a step gathers it forward, and backward
    """
    if scheme.weights_tier == DEVICE:
        return
    sizes = tuple(DTYPE_BYTES[compute_dtype] * numel // levels.size(scheme.weights) for numel in units)
    forward, backward = fetched_bytes(sizes, scheme, levels, gathers)
    sent = {WEIGHTS_STASH: sum(sizes), FORWARD_FETCH: forward, BACKWARD_FETCH: backward}
    for tier in (HOST, DISK)[: 1 + (scheme.weights_tier == DISK)]:
        yield from ((tier, row.name, int(size)) for row, size in sent.items() if size)


def fetched_bytes(
    sizes: Sequence[int], scheme: Scheme, levels: Levels, gathers: Sequence[tuple[Num, Num]]
) -> tuple[Num, Num]:
    """What a step fetches for forwards, but for the first of each unit, and for backwards.

    sizes: bytes of a rank's shard of each unit, the root's first
    gathers: as in `weights_copies`, or, without `resident`, their means or a grid's
    The root stays gathered from forward to backward, and backwards gather a secondary copy, which is on the
    device.
    """
    has_secondary = keeps_secondary(scheme, levels)
    forwards = [forward for forward, _ in gathers]
    backwards = [0, *(0 if has_secondary else backward for _, backward in gathers[1:])]
    if scheme.resident:
        asked = tuple(map(int, forwards)), tuple(map(int, backwards))
        return _of_those_that_leave(tuple(sizes), *asked, scheme.resident)
    forward = sum(size * (often - 1) for size, often in zip(sizes, forwards, strict=True))
    return forward, sum(size * often for size, often in zip(sizes, backwards, strict=True))


@cache
def _of_those_that_leave(
    sizes: tuple[int, ...], forwards: tuple[int, ...], backwards: tuple[int, ...], resident: float
) -> tuple[int, int]:
    found = fetched(step_order(forwards, backwards), sizes, int(resident * sum(sizes)))
    return found["forward"], found["backward"]
