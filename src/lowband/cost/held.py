"""What a rank of a run holds of the engine's states, in closed form: of stages, or of both kinds of units."""

from collections.abc import Mapping

from lowband.cost.activations import to_host_bytes
from lowband.cost.bytes import cut_shapes, expert_numels, experts_apart, unit_numels
from lowband.cost.memory import start_bytes, state_bytes, together
from lowband.cost.stages import stages_states
from lowband.spec.activations import KEPT_KIND
from lowband.spec.axes import Axes
from lowband.spec.run import RunSpec


def held_bytes(spec: RunSpec, backend: str, with_start: bool = False) -> dict[str, int]:
    """State -> peak bytes of a rank. with_start: runs of earlier versions did not record it"""
    if spec.is_in_stages:
        return stages_states(spec)
    axes, apart = Axes(tensor=spec.tensor, expert=spec.expert), experts_apart(spec.model, spec.expert)
    of_units = [(unit_numels(spec.model, spec.levels, axes), spec.levels)]
    if apart:
        of_units.append((expert_numels(spec.model, spec.levels_alike, spec.expert), spec.levels_alike))
    of_both = [
        state_bytes(
            numels,
            spec.scheme,
            levels,
            spec.compute_dtype,
            spec.reduce_dtype,
            spec.accumulation,
            backend,
            spec.collectives,
            spec.order,
            spec.fused_adamw,
        )
        for numels, levels in of_units
    ]
    closed = together(of_both)
    if spec.recompute == "host":
        block = to_host_bytes(spec.model, spec.micro_batch, spec.seq_len, spec.compute_dtype)
        micro_batches = spec.accumulation if spec.order == "breadth" else 1
        closed[KEPT_KIND] = micro_batches * len(spec.recomputed) * block
    if with_start:
        closed["start"] = _start(spec, apart)
    return closed


def _start(spec: RunSpec, apart: Mapping[str, tuple[int, ...]]) -> int:
    """apart: shapes of a block's experts on a rank, where ranks divide them"""
    rank = 0 if spec.device == "fake" else None
    of_start = spec.scheme, spec.levels, spec.compute_dtype, rank
    peak = start_bytes(spec.model.unit_shapes(apart), *of_start, cut_shapes(spec.model, spec.tensor, apart))
    if not apart:
        return peak
    wholes = [[shape for name, shape in spec.model.expert_shapes().items() if name in apart]]
    of_start = spec.scheme, spec.levels_alike, spec.compute_dtype, rank
    return max(peak, start_bytes(wholes, *of_start, [[*apart.values()]]))
