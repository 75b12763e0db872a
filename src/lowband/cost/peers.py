"""Bytes that one rank of a peer must send per step to run a scheme, in closed form.

The closed form is that of our own engine (`cost.bytes`), summed over levels; the sum does not depend on a
collective's hops. Only the padding differs: FSDP2 cuts every parameter along its first dimension, DeepSpeed
cuts it flat, DDP does not cut.
"""

import math
from collections.abc import Sequence

from lowband.cost.bytes import sent_bytes, unit_numels
from lowband.spec.partition import round_up
from lowband.spec.run import RunSpec


def peer_sent_bytes(spec: RunSpec) -> int:
    """Bytes per rank and step, over all levels and collectives, with the padding of the spec's engine."""
    levels = spec.levels
    if spec.engine == "lowband":
        units = unit_numels(spec.model, levels)
    else:
        units = [
            sum(_padded(spec.engine, shape, levels.size(spec.scheme.optim)) for shape in unit)
            for unit in spec.model.unit_shapes()
        ]
    counts = sent_bytes(
        units,
        spec.scheme,
        levels,
        spec.compute_dtype,
        spec.reduce_dtype,
        spec.accumulation,
        is_clipped=False,  # norms are control, counted separately
        order=spec.order,
    )
    return sum(map(int, counts.values()))  # hop by hop they are whole


def _padded(engine: str, shape: Sequence[int], ranks: int) -> int:
    """Elements of a parameter, padding included."""
    if engine == "fsdp2":
        return round_up(shape[0], ranks) * math.prod(shape[1:])
    return round_up(math.prod(shape), ranks) if engine == "deepspeed" else math.prod(shape)
