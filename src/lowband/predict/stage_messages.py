"""Seconds of the messages between a pipeline's stages."""

from lowband.cost.collectives import Network
from lowband.cost.numbers import Num
from lowband.predict.workload import Workload


def exchange_s(job: Workload, network: Network) -> Num:
    """To send a micro-batch's activations to the next stage and gradients back, over a rank's stages.

    Each tensor-parallel rank sends its part (scatter/gather, arXiv 2104.04473, section 4.1).
    """
    if job.axes.pipeline == 1:
        return 0.0
    level = job.mesh.along("pipeline")[0].level  # the links to the next stage
    moved = 2 * job.micro_batch * job.own_tokens * job.model.hidden / job.axes.tensor
    one = network.base_s + network.latency_s(level) + moved / network.rate(level)
    return 2 * job.axes.chunks * one
