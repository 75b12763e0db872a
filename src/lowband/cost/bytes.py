"""Bytes that one rank sends per optimizer step, by level, collective and wire, in closed form.

A hop joins n partners. In a gather each partner forwards n - 1 times what it holds before the hop; in a
reduce-scatter it sends n - 1 of the n parts of what it holds. A collective over several levels is a chain of
hops whose buffers shrink outwards by n at each level. On a quantized wire a message is codes and scales.

Source: the ring and pairwise-exchange volumes of Thakur, Rabenseifner and Gropp (2005), sections 4.1 and 4.3;
ZeRO++ (arXiv 2306.10209), sections 3.1 and 3.3, for one quantization per gather and one per reduction hop.
"""

from collections import Counter
from collections.abc import Sequence

from lowband.cost.memory import keeps_secondary, keeps_weights_copy
from lowband.spec.machine import SELF, WORLD, Levels
from lowband.spec.model import ModelSpec
from lowband.spec.partition import UnitLayout
from lowband.spec.scheme import Scheme
from lowband.spec.wire import DTYPE_BYTES, Wire, message_bytes

NORM_BYTES = 8  # squares are summed in fp64

Counts = Counter[tuple[str, str, str]]


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
    is_clipped: bool,
) -> dict[tuple[str, str, str], int]:
    """Bytes sent per rank in one optimizer step: (level, collective, wire) -> bytes.

    units: elements per unit, padding included, the root's first; the root stays gathered from forward to
           backward, so it is not gathered again
    is_clipped: whether gradients are clipped by their global norm: ranks gather each other's squares
    A step counts the gather of the weights that the step before it has updated.
    """
    counts: Counts = Counter()
    backward = scheme.secondary if keeps_secondary(scheme, levels) and scheme.secondary else scheme.weights
    for unit, numel in enumerate(units):
        step = _Step(scheme, levels, numel, counts)
        step.gather("forward_gather", SELF, scheme.weights, compute_dtype, accumulation)
        if unit > 0:
            step.gather("backward_gather", SELF, backward, compute_dtype, accumulation)
        step.reduce("grad_reduce", SELF, scheme.grads, reduce_dtype, accumulation)
        step.reduce("boundary_reduce", scheme.grads, scheme.optim, reduce_dtype, 1)
        step.reduce("replica_reduce", scheme.optim, WORLD, reduce_dtype, 1)
        step.gather("replica_reduce", scheme.optim, WORLD, reduce_dtype, 1)
        if keeps_weights_copy(scheme, levels, compute_dtype == "fp32"):
            step.gather("update_gather", scheme.weights, scheme.optim, compute_dtype, 1)
    if is_clipped:
        held = NORM_BYTES
        for hop in reversed(levels.hops(SELF, WORLD)):
            counts[hop.level, "norm_gather", "native"] += (hop.count - 1) * held
            held *= hop.count
    return dict(counts)


class _Step:
    """Counts one unit's collectives."""

    def __init__(self, scheme: Scheme, levels: Levels, numel: int, counts: Counts) -> None:
        self._scheme, self._levels, self._numel, self._counts = scheme, levels, numel, counts

    def gather(self, name: str, inner: str, outer: str, dtype: str, passes: int) -> None:
        wire = self._wire(name, dtype)
        held = self._message(self._numel // self._levels.size(outer), wire, dtype)
        for hop in reversed(self._levels.hops(inner, outer)):
            self._counts[hop.level, name, wire] += passes * (hop.count - 1) * held
            held *= hop.count

    def reduce(self, name: str, inner: str, outer: str, dtype: str, passes: int) -> None:
        wire = self._wire(name, dtype)
        numel = self._numel // self._levels.size(inner)
        for hop in self._levels.hops(inner, outer):
            numel //= hop.count
            sent = (hop.count - 1) * self._message(numel, wire, dtype)
            self._counts[hop.level, name, wire] += passes * sent

    def _wire(self, name: str, dtype: str) -> Wire:
        """A cast to the native dtype is no cast."""
        wire: Wire = getattr(self._scheme, name)
        return "native" if wire in DTYPE_BYTES and wire == dtype else wire

    def _message(self, numel: int, wire: Wire, dtype: str) -> int:
        return message_bytes(numel, wire, dtype, self._scheme.block_size)
