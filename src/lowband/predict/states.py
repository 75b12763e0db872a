"""What linear layers wait for the states of other ranks along context, as the engine's ways send them.

A state travels behind products that do not need it, a seconds of a block's forward and b of its backward
(cost/linear.py); t are the seconds until the last rank has what it waits for:

    gather, scan   level by level; each block waits join(a, t) - a forward, join(b, t) - b backward
    pass           from rank to rank, so a rank lags behind the one before, by as much in every block: all
                   blocks of a pass wait once. A recomputed forward goes the other way than the backward:
                   there every block waits for both
"""

from dataclasses import dataclass

from lowband.cost.collectives import Network
from lowband.cost.compute import Work
from lowband.cost.memory import MASTER_BYTES
from lowband.cost.numbers import Num, join
from lowband.cost.states import sends_in_turn, sent_by_level, state_elements
from lowband.predict.workload import Workload
from lowband.spec.mesh import SELF, WORLD


@dataclass(frozen=True)
class StateWaits:
    """Seconds of a linear block and micro-batch, in the mean. travel: of one way, hidden or not"""

    forward: Num
    backward: Num
    travel: Num


def state_waits(job: Workload, network: Network, work: Work, overlap: float) -> StateWaits:
    """What a linear block waits for, its recomputed forward's share in backward. All are 0 without states."""
    layers = job.model.linear_layers
    if job.layout.travels is None or not layers:
        return StateWaits(0.0, 0.0, 0.0)
    travel = _travel_s(job, network)
    forward = join(work.linear, travel, overlap) - work.linear
    backward = join(work.linear_backward, travel, overlap) - work.linear_backward
    again, blocks = job.recompute == "full", max(layers // job.axes.pipeline, 1)
    if job.layout.travels != "pass":
        return StateWaits(forward, backward + forward * again, travel)
    return StateWaits(forward / blocks, backward + forward if again else backward / blocks, travel)


def _travel_s(job: Workload, network: Network) -> Num:
    """Seconds from when all ranks have their states until the last one has the sum before it."""
    levels, states = job.layout.levels, job.layout.travels
    elements = state_elements(job.model, 1, job.axes.tensor) * job.micro_batch
    hops = levels.hops(SELF, WORLD)
    total: Num = 0.0
    if states == "pass":
        in_turn = dict(sends_in_turn(levels))
        for hop in hops:
            alone = hop.stride // hops[0].stride
            message = network.base_s + network.message_s(hop, alone, MASTER_BYTES * elements)
            total = total + in_turn[hop.level] * message
        return total
    assert states is not None
    sent = sent_by_level(states, state_elements(job.model, 1, job.axes.tensor), levels)
    for hop in hops:
        times = 2 if states == "scan" and hop is not hops[-1] else 1
        of_hop = float(sent[hop.level]) * MASTER_BYTES * job.micro_batch
        total = total + network.hop_s(hop, of_hop, times)
    return total
