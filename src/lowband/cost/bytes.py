"""Bytes that one rank sends per optimizer step, by level and collective, in closed form.

A hop between two levels joins n partners. Of a buffer of S bytes (the larger side), each partner sends
S (n - 1) / n, in a gather as in a reduce-scatter. A collective over several levels is a chain of hops whose
buffers shrink outwards by n at each level.

Source: the ring and pairwise-exchange volumes of Thakur, Rabenseifner and Gropp (2005), sections 4.1 and 4.3.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from lowband.cost.memory import DTYPE_BYTES, keeps_secondary, keeps_weights_copy
from lowband.spec.machine import SELF, WORLD, Levels
from lowband.spec.model import ModelSpec
from lowband.spec.partition import UnitLayout
from lowband.spec.scheme import Scheme


class Route(NamedTuple):
    """A collective's way through the levels."""

    collective: str
    inner: str
    outer: str
    passes: int
    element_bytes: int
    units: Sequence[int]  # elements of each unit's whole buffer


def unit_numels(model: ModelSpec, levels: Levels) -> list[int]:
    """Elements per unit, padding included: the root's, then each block's."""
    return [UnitLayout.of(shapes, levels.world).numel for shapes in model.unit_shapes()]


def sent_bytes(
    units: Sequence[int],
    scheme: Scheme,
    levels: Levels,
    compute_dtype: str,
    reduce_dtype: str,
    accumulation: int,
) -> dict[tuple[str, str], int]:
    """Bytes sent per rank in one optimizer step: (level, collective) -> bytes.

    units: elements per unit, padding included, the root's first; the root stays gathered from forward to
           backward, so it is not gathered again
    A step counts the gather of the weights that the step before it has updated.
    """
    counts: Counter[tuple[str, str]] = Counter()
    for route in _routes(units, scheme, levels, compute_dtype, reduce_dtype, accumulation):
        for numel in route.units:
            size = numel // levels.size(route.inner) * route.element_bytes
            for hop in levels.hops(route.inner, route.outer):
                counts[hop.level, route.collective] += route.passes * size * (hop.count - 1) // hop.count
                size //= hop.count
    return dict(counts)


def _routes(
    units: Sequence[int],
    scheme: Scheme,
    levels: Levels,
    compute_dtype: str,
    reduce_dtype: str,
    accumulation: int,
) -> list[Route]:
    b_c, b_r = DTYPE_BYTES[compute_dtype], DTYPE_BYTES[reduce_dtype]
    backward = scheme.secondary if keeps_secondary(scheme, levels) and scheme.secondary else scheme.weights
    routes = [
        Route("forward_gather", SELF, scheme.weights, accumulation, b_c, units),
        Route("backward_gather", SELF, backward, accumulation, b_c, units[1:]),
        Route("grad_reduce", SELF, scheme.grads, accumulation, b_r, units),
        Route("boundary_reduce", scheme.grads, scheme.optim, 1, b_r, units),
        Route("replica_reduce", scheme.optim, WORLD, 2, b_r, units),
    ]
    if keeps_weights_copy(scheme, levels, compute_dtype == "fp32"):
        routes.append(Route("update_gather", scheme.weights, scheme.optim, 1, b_c, units))
    return routes
