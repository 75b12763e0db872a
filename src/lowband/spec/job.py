"""How to request a run's nodes from a cluster's Slurm: `slurm/<cluster>/job.yaml`, beside machine.yaml.

It is not part of a run's spec: a run does not change when a queue does.
"""

import math
from typing import Literal

from pydantic import Field, PositiveInt

from lowband.errors import UserError
from lowband.spec.run import RunSpec
from lowband.spec.yaml_model import Strict


class SlurmRequest(Strict):
    """What every run on a cluster requests from Slurm. Runs take whole nodes."""

    tasks: Literal["rank", "node"] = Field(
        description="what srun starts: each rank, or on each node a launcher that forks the node's ranks"
    )
    cpus_per_rank: PositiveInt
    constraint: str = Field(default="", description="sbatch --constraint")
    sbatch: str = Field(default="", description="further options of sbatch")
    srun: str = Field(default="", description="further options of srun")
    spare_minutes: PositiveInt = Field(
        default=2, description="added to the run's own time limit: start, imports, recording the outcome"
    )
    longest_minutes: dict[PositiveInt, PositiveInt] = Field(
        default={}, description="queue limits: up to this many nodes, at most this many minutes"
    )

    def resources(self, spec: RunSpec) -> dict[str, str | int]:
        """Snakemake resources of a run, as its Slurm executor understands them.

        Raises UserError if the run is too large or too long for the cluster's queues.
        """
        per_node = spec.machine.node_size
        nodes = math.ceil(_processes(spec) / per_node)
        minutes = math.ceil(spec.time_limit_s / 60) + self.spare_minutes
        return {
            "nodes": nodes,
            "tasks_per_node": 1 if spec.device == "fake" else per_node,
            "cpus_per_task": self.cpus_per_rank,
            "runtime": self._within_queue(spec, nodes, minutes),
            "constraint": self.constraint,
            "slurm_extra": self.sbatch,
        }

    def tasks_per_node(self, spec: RunSpec) -> int:
        """Number of tasks that srun starts on each node."""
        return 1 if self.tasks == "node" else min(_processes(spec), spec.machine.node_size)

    def _within_queue(self, spec: RunSpec, nodes: int, minutes: int) -> int:
        if not self.longest_minutes:
            return minutes
        limits = [limit for most, limit in sorted(self.longest_minutes.items()) if nodes <= most]
        if not limits:
            raise UserError(
                f"{nodes} nodes",
                where=f"{spec.run_id}: ranks",
                allowed=f"{max(self.longest_minutes)} at most, longest_minutes of job.yaml",
            )
        if minutes > limits[0]:
            raise UserError(
                f"{minutes} minutes on {nodes} nodes",
                where=f"{spec.run_id}: time_limit_s",
                allowed=f"{limits[0]} minutes at most, longest_minutes of job.yaml",
            )
        return minutes


def _processes(spec: RunSpec) -> int:
    """Processes of a run. A count on fake tensors takes one, whatever number of ranks it counts for."""
    return 1 if spec.device == "fake" else spec.ranks
