"""Seconds that each collective of weights and gradients takes in its lane, hidden or not.

Of a unit: messages over its levels, in as many pieces as the stack cuts it into, and quantization. The root
is one unit, and blocks are alike. Experts that ranks divide travel over other levels; of adapters beside
frozen weights the passes gather both, and all else is the adapters'.
"""

from collections.abc import Sequence
from dataclasses import replace

from lowband.cost.buffers import by_bucket
from lowband.cost.bytes import Transfer, experts_apart, transfers
from lowband.cost.collectives import Network, number
from lowband.cost.compute import Computer
from lowband.cost.lora import of_frozen
from lowband.cost.matrices import NAMES as MATRIX_NAMES
from lowband.cost.matrices import exchange_s as exchange_s_of_matrices
from lowband.cost.numbers import Num
from lowband.predict.exposed import Lane
from lowband.predict.place import Place, reused
from lowband.predict.workload import Workload
from lowband.spec.mesh import Levels
from lowband.spec.step import BACKWARD_GATHER, FORWARD_GATHER


def lanes(job: Workload, place: Place, network: Network, computer: Computer) -> tuple[Lane, Lane]:
    """Seconds of each collective of the root and of a block, of the mean one where some are not gathered
    again."""
    root, block = _lanes_of_place(job, place, network, computer)
    if stay := reused(job, place):
        again = 1 - stay / place.blocks
        block = {name: time * (again if name == BACKWARD_GATHER.name else 1) for name, time in block.items()}
    return root, block


def _lanes_of_place(job: Workload, place: Place, network: Network, computer: Computer) -> tuple[Lane, Lane]:
    of = job, network, computer
    if job.lora is not None:
        return _lanes_of_adapted(*of, place.numels)
    root, block = _lanes_of(*of, place.numels, job.levels)
    if not place.experts:
        return root, block
    _, experts = _lanes_of(*of, place.expert_numels, job.levels_alike)
    return root, {name: block.get(name, 0.0) + experts.get(name, 0.0) for name in block | experts}


def _lanes_of_adapted(
    job: Workload, network: Network, computer: Computer, frozen: Sequence[int]
) -> tuple[Lane, Lane]:
    """Passes gather all weights; gradients, and new weights, are those of the adapters."""
    at_rest = replace(job, scheme=of_frozen(job.scheme))
    numels = [a + b for a, b in zip(frozen, job.adapters, strict=True)]
    gathered = _lanes_of(at_rest, network, computer, numels, job.levels)
    trained = _lanes_of(job, network, computer, job.adapters, job.levels)
    passes = (FORWARD_GATHER.name, BACKWARD_GATHER.name)
    root, block = (
        {name: time for name, time in every.items() if name in passes}
        | {name: time for name, time in some.items() if name not in passes}
        for every, some in zip(gathered, trained, strict=True)
    )
    return root, block


def _lanes_of(
    job: Workload, network: Network, computer: Computer, numels: Sequence[int], levels: Levels
) -> tuple[Lane, Lane]:
    """numels: elements of units, the root's first; levels: over which they are placed"""
    reductions = len(by_bucket(numels, job.scheme, levels, job.stack.reduce_dtype)) / len(numels)
    root, block, *_ = numels
    of = job, network, computer, levels
    return (
        _lane(*of, root, reductions, is_root=True) if root else {},
        _lane(*of, block, reductions, is_root=False),
    )


def _lane(
    job: Workload,
    network: Network,
    computer: Computer,
    levels: Levels,
    numel: int,
    reductions: float,
    is_root: bool,
) -> Lane:
    """Seconds of each collective of one unit: messages and quantization.

    reductions: of gradients, per unit: fewer than one where units share a bucket
    """
    parts: dict[str, list[Transfer]] = {}
    for t in transfers(numel, is_root, job.scheme, levels, job.compute_dtype, job.stack.reduce_dtype):
        parts.setdefault(t.collective.name, []).append(t)
    cut = {
        "masters": 1.0,
        "weights": number(job.stack.gathers, network.case),
        "gradients": number(job.stack.reductions, network.case),
    }

    def pieces(carries: str) -> float:
        return (reductions if carries == "gradients" else 1) * (1 if is_root else cut[carries])

    return {
        name: network.collective_s(hops, pieces(hops[0].collective.carries))
        + computer.quantize_s(sum(hop.quantized_values for hop in hops))
        for name, hops in parts.items()
    }


def matrices_s(job: Workload, place: Place, network: Network) -> dict[str, Num]:
    """Seconds of what travels to and from the owners of whole matrices, where the optimizer needs them. Ranks
    along tensor, whose parts of matrices would have to be put together, too, share them."""
    if job.stack.optimizer != "muon":
        return {}
    apart, shapes = experts_apart(job.model, job.axes.expert), job.model.unit_shapes
    units = tuple(tuple(unit) for unit in shapes(apart)[-place.blocks :])
    once = exchange_s_of_matrices(network, units, job.levels, job.scheme.optim, job.axes.tensor)
    if apart:
        experts = ((*apart.values(),),) * place.blocks
        once = once + exchange_s_of_matrices(network, experts, job.levels_alike, job.scheme.optim)
    return dict.fromkeys(MATRIX_NAMES, once)
