"""Seconds of messages between a pipeline's stages: activations, their gradients, a tied head's gradient.

Ranks that are neighbours along the pipeline may be in one node or in two. A stack that waits for each message
waits for the slowest of these links while the pipeline is full; as it fills and empties, each micro-batch
crosses all of them once. What messages add that travel beside the computation is played with every link's own
time (bubble.py).
"""

from math import prod
from typing import NamedTuple

from lowband.cost.collectives import Network
from lowband.cost.numbers import Num
from lowband.cost.stages_step import place_of
from lowband.predict.workload import Workload
from lowband.spec.mesh import Digit


class Exchange(NamedTuple):
    """Seconds of a micro-batch's messages to and from a rank's stages: over the slowest link, and in the
    mean."""

    slowest: Num
    mean: Num


def exchange_s(job: Workload, network: Network) -> Exchange:
    """Each rank along tensor sends its part (scatter/gather, arXiv 2104.04473, section 4.1)."""
    digits = job.mesh.along("pipeline")
    if not digits:
        return Exchange(0.0, 0.0)
    times = [2 * job.axes.chunks * time for time in _by_level(job, network, digits)]
    crossed = boundaries(digits)
    mean = sum(n * time for n, time in zip(crossed, times, strict=True)) / sum(crossed)
    return Exchange(times[-1], mean)


def sends_s(job: Workload, network: Network) -> list[Num]:
    """Seconds of one message behind each stage but the last; 0 where the next one is on the same rank."""
    digits, axes = job.mesh.along("pipeline"), job.axes
    times = _by_level(job, network, digits)
    found = list[Num]()
    for stage in range(axes.stages - 1):
        here, there = (place_of(axes.row, each, axes.pipeline) for each in (stage, stage + 1))
        crossed: Num = 0.0
        for digit, time in zip(digits, times, strict=True):  # the outermost one in which they differ
            crossed = time if here != there else crossed
            here, there = here // digit.count, there // digit.count
        found.append(crossed)
    return found


def boundaries(digits: list[Digit]) -> list[int]:
    """How many ranks along the pipeline have their next one over each of its levels, inner first."""
    counts = [digit.count for digit in digits]
    return [(count - 1) * prod(counts[i + 1 :]) for i, count in enumerate(counts)]


def tied_s(job: Workload, network: Network) -> Num:
    """Of a step: the gradient of an embedding that is also the head, between the first and the last rank."""
    digits = job.mesh.along("pipeline")
    if not job.model.tied_head or job.axes.has_both_ends:
        return 0.0
    numel = job.model.vocab * job.model.hidden / job.axes.tensor
    return _message_s(network, digits[-1].level, 4 * numel / job.levels.size(job.scheme.optim))


def _by_level(job: Workload, network: Network, digits: list[Digit]) -> list[Num]:
    """Of one message over each of the pipeline's levels, inner first."""
    moved = 2 * job.micro_batch * job.own_tokens * job.model.hidden / job.axes.tensor
    return [_message_s(network, digit.level, moved) for digit in digits]


def _message_s(network: Network, level: str, sent: Num) -> Num:
    return network.base_s + network.latency_s(level) + sent / network.rate(level)
